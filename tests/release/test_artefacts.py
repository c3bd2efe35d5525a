"""Wheel, payload, licences and SBOM: what a release consists of, built from this checkout."""

from __future__ import annotations

import datetime
import json
import pathlib
import subprocess
import zipfile

import pytest

from release import __main__ as verbs
from release import dependencies, versions, wheel
from release.dependencies import Package

ROOT = versions.ROOT


def tracked() -> set[str]:
    """The repository's own files, also ones that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel of this checkout."""
    return wheel.build(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_is_pure_complete_and_needs_nothing(built: pathlib.Path) -> None:
    """And the protocol imports from it alone."""
    assert wheel.problems(built, ROOT, versions.version(), tracked()) == []
    assert wheel.import_problem(built) is None


def repacked(
    built: pathlib.Path,
    folder: pathlib.Path,
    *,
    add: dict[str, str],
    drop: str = "",
    change: tuple[str, str] = ("", ""),
) -> pathlib.Path:
    """The wheel with files more, one less, or other words in its metadata."""
    target = folder / built.name
    before, after = (word.encode() for word in change)
    with zipfile.ZipFile(built) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if name != drop:
                content = old.read(name)
                changes = bool(before) and name.endswith("METADATA")
                new.writestr(name, content.replace(before, after) if changes else content)
        for name, text in add.items():
            new.writestr(name, text)
    return target


@pytest.mark.parametrize(
    ("add", "drop", "change", "words"),
    [
        ({"kvshare_connector/fast.so": ""}, "", ("", ""), "compiled file kvshare_connector/fast.so"),
        ({"tests/x.py": ""}, "", ("", ""), "tests/x.py does not belong into it"),
        ({"kvshare_layout/extra.py": ""}, "", ("", ""), "kvshare_layout/extra.py is no file of the repository"),
        ({}, "kvshare_layout/heads.py", ("", ""), "kvshare_layout/heads.py is missing"),
        ({}, "", ("Name: kvshare\n", "Name: kvshare\nRequires-Dist: torch>=2\n"), "needs torch>=2"),
        ({}, "", ("License-Expression: Apache-2.0", "License-Expression: MIT"), "licence Apache-2.0"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_named(
    built: pathlib.Path, tmp_path: pathlib.Path, add: dict[str, str], drop: str, change: tuple[str, str], words: str
) -> None:
    """Each mistake by its file."""
    changed = repacked(built, tmp_path, add=add, drop=drop, change=change)
    assert any(words in text for text in wheel.problems(changed, ROOT, versions.version(), tracked()))


def test_the_payload_is_source_only() -> None:
    """The same image on every machine; a compiled file would be named."""
    assert verbs.compiled_payload(tracked()) == []
    assert verbs.compiled_payload({"connector/kvshare_connector/kernels/x.so"}) == [
        "connector/kvshare_connector/kernels/x.so: only Python source and py.typed expected"
    ]


def test_licences_of_what_we_ship_are_known_and_allowed() -> None:
    """The closure of our extras, as the tests' environment has it."""
    packages = dependencies.closure(ROOT)
    assert {"kopf", "pydantic", "typer", "kubernetes", "pydantic-core"} <= set(packages)
    assert not {"torch", "vllm", "pytest", "kvshare"} & set(packages)
    assert dependencies.licence_problems(packages) == []


@pytest.mark.parametrize(
    ("licence", "good"),
    [
        ("MIT", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR GPL-3.0-only) AND Apache-2.0", True),
        ("AGPL-3.0-only", False),
        ("Apache-2.0 WITH LLVM-exception", False),
        (None, False),
    ],
)
def test_licences_are_judged_by_their_expression(licence: str | None, good: bool) -> None:
    """All parts of an AND, one of an OR; an unknown one is a problem, not a pass."""
    assert (dependencies.licence_problems({"x": Package("x", "1", licence, ())}) == []) is good


def test_the_sbom_names_everything_and_fits_its_schema() -> None:
    """Every package with version, licence and address; dependencies lead from us to each; the same twice."""
    packages = dependencies.closure(ROOT)
    time = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
    document = json.loads(dependencies.sbom(packages, "1.2.3", time))
    assert document["specVersion"] == "1.6"
    assert document["metadata"]["component"]["version"] == "1.2.3"
    listed = {one["name"]: one for one in document["components"]}
    assert set(listed) == set(packages)
    assert all(one["purl"].startswith("pkg:pypi/") and one["licenses"] for one in listed.values())
    needs = {one["ref"]: set(one.get("dependsOn", ())) for one in document["dependencies"]}
    reached: set[str] = set()
    waiting = ["kvshare"]
    while waiting:
        for name in needs[waiting.pop()] - reached:
            reached.add(name)
            waiting.append(name)
    assert reached == set(packages)
    assert dependencies.sbom(packages, "1.2.3", time) == dependencies.sbom(packages, "1.2.3", time)
