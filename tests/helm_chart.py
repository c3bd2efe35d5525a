"""The chart as helm renders it, for tests: every object, one of them, and what a process is told."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
from typing import Any

import yaml

from pods import Json
from testbed.prepare.go_programs import program

ROOT = pathlib.Path(__file__).parents[1]
CHART = ROOT / "charts" / "kvshare"
NAMESPACE = "kvshare-system"
SNAPSHOT = pathlib.Path(__file__).parent / "chart" / "testdata" / "default.yaml"
SNAPSHOT_HEAD = "# What the chart renders with its defaults. Written by `KVSHARE_WRITE=1 make test-apiserver`.\n"


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run helm; its result is not checked."""
    return subprocess.run([str(program("helm")), *words], capture_output=True, text=True, check=False)


def template(*words: str, release: str = "kvshare", values: Json | None = None) -> subprocess.CompletedProcess[str]:
    """Render the chart with further options and values; the result is not checked."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values or {}, file)
        file.flush()
        return helm("template", release, str(CHART), "--namespace", NAMESPACE, "--values", file.name, *words)


def rendered(*sets: str, release: str = "kvshare", values: Json | None = None) -> list[Json]:
    """Every object of the chart, hooks included."""
    options = [word for value in sets for word in ("--set", value)]
    finished = template(*options, release=release, values=values)
    assert finished.returncode == 0, finished.stderr
    return [thing for thing in yaml.safe_load_all(finished.stdout) if thing]


def refused(values: Json) -> str:
    """What helm says about values that it must refuse."""
    finished = template(values=values)
    assert finished.returncode != 0, "these values were accepted"
    return finished.stderr


def one(objects: list[Json], kind: str, name: str, namespace: str | None = None) -> Json:
    """One object by kind and name."""
    found = [
        thing
        for thing in objects
        if (thing["kind"], thing["metadata"]["name"]) == (kind, name)
        and namespace in (None, thing["metadata"].get("namespace"))
    ]
    assert len(found) == 1, [(thing["kind"], thing["metadata"]["name"]) for thing in objects]
    return found[0]


def without_hooks(objects: list[Json]) -> list[Json]:
    """What `helm install` leaves in the cluster."""
    return [thing for thing in objects if "helm.sh/hook" not in (thing["metadata"].get("annotations") or {})]


def kinds(objects: list[Json]) -> set[str]:
    """Which kinds of objects there are."""
    return {thing["kind"] for thing in objects}


def pod_of(objects: list[Json], process: str) -> Json:
    """The pod spec of `controller` or `webhook`."""
    found: Json = one(objects, "Deployment", f"kvshare-{process}")["spec"]["template"]["spec"]
    return found


def environment_of(objects: list[Json], process: str) -> dict[str, str]:
    """The variables with a literal value that a process gets."""
    entries: list[dict[str, Any]] = pod_of(objects, process)["containers"][0]["env"]
    return {entry["name"]: entry["value"] for entry in entries if "value" in entry}


def snapshot() -> str:
    """What the chart renders with its defaults, without the generated resource, as text that reads well in a diff."""
    objects = [thing for thing in rendered() if thing["kind"] != "CustomResourceDefinition"]
    return SNAPSHOT_HEAD + yaml.safe_dump_all(objects, sort_keys=False, width=118)
