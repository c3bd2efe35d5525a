"""Every YAML block in README and docs is something that the product or Kubernetes takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvshare_operator.api import crd, names
from kvshare_operator.api.pool import read_spec
from kvshare_operator.api.reasons import Refusal
from kvshare_operator.cli.inject_items import Item, items_of
from kvshare_operator.cli.pod_templates import misplaced, pod_templates
from kvshare_operator.core.injection.optin import USER_ANNOTATIONS, read_opt_in
from kvshare_operator.core.pool.view import PoolView, view
from pages import ALL, PAGES, ROOT, Block
from pods import SETTINGS, Json
from testbed.cluster import api_server
from testbed.kubectl import Kubectl, KubectlError

YAML_BLOCKS = [pytest.param(block, id=block.place) for block in ALL if block.language in ("yaml", "yml")]
VALUES = json.loads((ROOT / "charts" / "kvshare" / "values.schema.json").read_text())
SPEC_SCHEMA = crd.structural_schema()["properties"]["spec"]
BUILT_IN = re.compile(r"v1|(apps|batch|policy|autoscaling)/v1|.*\.k8s\.io/v1")
FOREIGN_GROUPS = {
    "argoproj.io", "helm.toolkit.fluxcd.io", "source.toolkit.fluxcd.io", "kustomize.config.k8s.io", "serving.kserve.io",
    "leaderworkerset.x-k8s.io", "nvidia.com", "monitoring.coreos.com", "cert-manager.io", "sriovnetwork.openshift.io",
}  # fmt: skip
"""API groups of other projects that examples use; their objects are not validated beyond their pod templates."""


def _pools(page: Path) -> dict[tuple[str, str], PoolView | Refusal]:
    found: dict[tuple[str, str], PoolView | Refusal] = {}
    for block in ALL:
        if block.page == page and block.language == "yaml":
            for one in block.documents():
                if isinstance(one, dict) and one.get("kind") == names.KIND:
                    pool = {**one, "metadata": {"namespace": "inference", **one["metadata"]}}
                    found[pool["metadata"]["namespace"], pool["metadata"]["name"]] = view(
                        pool, SETTINGS.connector_image
                    )
    return found


def _kind(one: Any) -> str:
    if not isinstance(one, dict):
        return "unknown"
    if one.get("kind") == names.KIND:
        return "pool"
    if "apiVersion" in one and "kind" in one:
        return "object"
    if _annotations(one):
        return "annotations"
    return "values" if one and set(one) <= set(VALUES["properties"]) else "unknown"


def _annotations(node: Any) -> dict[str, str]:
    """All our annotations anywhere in a fragment."""
    found: dict[str, str] = {}
    if isinstance(node, dict):
        for key, value in node.items():
            if isinstance(key, str) and key.startswith(f"{names.GROUP}/"):
                found[key] = value
            else:
                found.update(_annotations(value))
    elif isinstance(node, list):
        for value in node:
            found.update(_annotations(value))
    return found


@pytest.mark.parametrize("block", YAML_BLOCKS)
def test_every_block_is_something_that_can_be_checked(block: Block) -> None:
    """A pool, an object with apiVersion and kind, values of the chart, a spec of a pool, or our annotations in place.

    Fragments say what they are by what they contain; a block that nothing knows cannot be trusted.
    """
    for one in block.documents():
        kind = _kind(one)
        if kind == "pool":
            jsonschema.Draft7Validator(SPEC_SCHEMA).validate(one["spec"])
            read_spec(one["spec"], unknown_keys="forbid")
        elif kind == "values":
            jsonschema.Draft7Validator(VALUES).validate(one)
        elif kind == "annotations":
            _check_annotations(_annotations(one))
        elif kind == "unknown":
            _check_fragment(one, block)
        else:
            group = one["apiVersion"].partition("/")[0]
            assert BUILT_IN.fullmatch(one["apiVersion"]) or group in FOREIGN_GROUPS, block.place


def _check_annotations(found: dict[str, str]) -> None:
    users = {key: value for key, value in found.items() if key not in (names.MEMBER, names.STORE)}
    assert set(users) <= USER_ANNOTATIONS
    assert all(isinstance(value, str) for value in users.values()), "numbers need quotes"
    outcome = read_opt_in({"metadata": {"annotations": {names.POOL: "any", **users}}})
    assert not isinstance(outcome, Refusal), outcome.sentence()


def _check_fragment(one: Any, block: Block) -> None:
    """A part of a pool's spec, with or without the word `spec`: it must fit beside the least that a pool needs."""
    assert isinstance(one, dict), block.place
    part = one.get("spec", one)
    least: Json = {
        "model": {"name": "m"},
        "prefill": {"tensorParallelSizes": [2]},
        "store": {"type": "External", "external": {"masterAddress": "a.b.svc:1"}},
    }
    merged = {**least, **part}
    for key in ("model", "store"):
        if isinstance(part.get(key), dict) and part[key].get("type", "External") == "External":
            merged[key] = {**least[key], **part[key]}
    try:
        read_spec(merged, unknown_keys="forbid")
    except Exception as error:
        pytest.fail(f"{block.place}: neither an object, nor values of the chart, nor a part of a pool: {error}")


@pytest.mark.parametrize("block", YAML_BLOCKS)
def test_pod_templates_that_opt_in_are_injected(block: Block) -> None:
    """With the pool of the same page, or one that fits the engine; a page that shows a refusal says `# refused`."""
    pools = _pools(block.page)
    for one in block.documents():
        if _kind(one) != "object" or not pod_templates(one):
            continue
        assert not misplaced(one, pod_templates(one)), block.place
        for item in items_of(block.place, one, pools, "inference", SETTINGS):
            if item.decision == "notOptedIn":
                continue
            expected = re.search(r"^ *# refused: (\w+)", block.text, re.MULTILINE)
            assert (item.decision, item.reason) == (("refused", expected[1]) if expected else ("injected", "")), _why(
                item
            )


def _why(item: Item) -> str:
    return f"{item.source}: {item.kind} {item.name}: {item.message} {item.remedy}"


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real API server with the namespaces that pages use."""
    with api_server(tmp_path_factory.mktemp("documentation")) as running:
        client = Kubectl(running.kubeconfig)
        wanted = {
            one["metadata"]["namespace"]
            for block in ALL
            if block.language == "yaml"
            for one in block.documents()
            if _kind(one) in ("object", "pool") and "namespace" in one.get("metadata", {})
        }
        for name in sorted(wanted | {"inference", "kvshare-system"}):
            client.run("create", "namespace", name)
        client.apply((ROOT / "crds" / "kvshare.dev_kvsharepools.yaml").read_text())
        client.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev")
        yield client


@pytest.mark.apiserver
@pytest.mark.parametrize("block", YAML_BLOCKS)
def test_a_real_api_server_takes_the_objects(kubectl: Kubectl, block: Block) -> None:
    """Pools with all their rules, and built-in kinds with strict fields; nothing is stored."""
    for one in block.documents():
        if _kind(one) not in ("object", "pool"):
            continue
        if _kind(one) == "object" and not BUILT_IN.fullmatch(one["apiVersion"]):
            continue
        if one["apiVersion"].startswith("kustomize."):
            continue
        within = kubectl.within(one["metadata"].get("namespace", "inference"))
        try:
            within.run("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(one))
        except KubectlError as error:
            pytest.fail(f"{block.place}: {error}")


def test_blocks_are_found() -> None:
    """At least a pool in README and several pages; a change of how pages are read must not make these tests empty."""
    assert any(block.page == ROOT / "README.md" and "KVSharePool" in block.text for block in ALL)
    assert len({block.page for block in ALL if "KVSharePool" in block.text and block.language == "yaml"}) >= 3
    assert len(PAGES) >= 15
