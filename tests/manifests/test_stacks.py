"""Pods as other projects generate them, with the pool and the change that the page of each says: who is injected how.

The pods in ``testdata/`` are written after those projects' documentation; the pools are the ones of the pages, so a
page cannot promise what the injection does not do.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

import pages
from kvshare_operator.api import names
from kvshare_operator.core.injection.inject import Injected, inject
from kvshare_operator.core.pool.view import PoolView, view
from pods import SETTINGS, Json, engine_of, variables

DATA = Path(__file__).parent / "testdata"
HOWTO = pages.ROOT / "docs" / "howto"


@dataclasses.dataclass(frozen=True)
class Expected:
    """What becomes of a pod.

    Attributes:
        way: `args` (flags appended), `variable` (flags in KVSHARE_VLLM_ARGS), `composed` (inside the pod's own JSON),
            `code` (a worker: code, no flags), or a reason code.
        tp: local tensor-parallel size in the record.
    """

    way: str
    tp: int | None = None


EXPECTED = {
    "plain": {
        "command-and-args": Expected("args", 4),
        "official-image": Expected("args", 2),
        "script": Expected("variable", 2),
        "script-without-the-variable": Expected("ShellWrapper"),
    },
    "llm-d": {"guide-decode": Expected("composed", 4), "modelservice-prefill": Expected("composed", 2)},
    "kserve": {
        "single-node-list": Expected("args", 4),
        "single-node-script": Expected("args", 4),
        "prefill-decode-with-nixl": Expected("FlagConflict"),
        "prefill-decode-as-a-list": Expected("composed", 2),
        "several-nodes": Expected("MultiNodeUnsupported"),
    },
    "leaderworkerset": {
        "leader": Expected("variable", 8),
        "worker": Expected("code"),
        "leader-without-the-variable": Expected("ShellWrapper"),
    },
    "production-stack": {"engine": Expected("args", 4), "engine-with-lmcache": Expected("FlagConflict")},
    "dynamo": {"worker-as-documented": Expected("UnknownLauncher"), "worker-with-a-script": Expected("variable", 2)},
}
"""By page of `docs/howto`, by name of the pod."""
PODS = {
    stack: {pod["metadata"]["name"]: pod for pod in yaml.safe_load_all((DATA / f"{stack}.yaml").read_text())}
    for stack in EXPECTED
}
CASES = [pytest.param(stack, name, id=f"{stack}: {name}") for stack, found in EXPECTED.items() for name in found]


def pool_of(page: str) -> PoolView:
    """The one pool on a page."""
    (pool,) = [
        one
        for block in pages.blocks(HOWTO / f"{page}.md")
        if block.language == "yaml"
        for one in block.documents()
        if isinstance(one, dict) and one.get("kind") == names.KIND
    ]
    return view(pool, SETTINGS.connector_image)


def way_of(outcome: Injected, before: Json) -> str:
    """How the flags came in."""
    container = engine_of(outcome, outcome.record.container)
    args = [str(word) for word in container.get("args") or []]
    if any(word.startswith("--kv-transfer-config.kv_connector=") for word in args):
        return "args"
    if "--kv-transfer-config.kv_connector=" in str(variables(container).get(names.ARGS_VARIABLE)):
        return "variable"
    if outcome.record.role == "worker":
        return "code"
    values = [json.loads(word) for word in args if word.startswith("{")]
    assert any(value.get("kv_connector") == "MultiConnector" for value in values), args
    return "composed"


def test_every_pod_has_an_expectation() -> None:
    """And every expectation a pod."""
    assert {stack: set(found) for stack, found in PODS.items()} == {
        stack: set(found) for stack, found in EXPECTED.items()
    }


@pytest.mark.parametrize(("stack", "name"), CASES)
def test_pods_are_injected_as_their_page_says(stack: str, name: str) -> None:
    """By the pool of the page; what is refused has the reason that the page explains."""
    expected, pod = EXPECTED[stack][name], PODS[stack][name]
    outcome = inject(pod, pool_of(stack), SETTINGS)
    if isinstance(outcome, Injected):
        assert (way_of(outcome, pod), outcome.record.local_tp) == (expected.way, expected.tp)
    else:
        assert outcome.code == expected.way, outcome.sentence()
        assert outcome.code in (HOWTO / f"{stack}.md").read_text()


@pytest.mark.parametrize(("stack", "name"), CASES)
def test_nothing_that_the_stack_wrote_is_lost(stack: str, name: str) -> None:
    """Other containers stay as they are; the engine keeps every argument besides a JSON value that ours joined."""
    pod = PODS[stack][name]
    outcome = inject(pod, pool_of(stack), SETTINGS)
    if not isinstance(outcome, Injected):
        return
    after = {one["name"]: one for key in ("initContainers", "containers") for one in outcome.pod["spec"].get(key) or []}
    for key in ("initContainers", "containers"):
        for one in pod["spec"].get(key) or []:
            if one["name"] != outcome.record.container:
                assert after[one["name"]] == one
                continue
            kept = [word for word in one.get("args") or [] if not str(word).startswith("{")]
            assert [word for word in after[one["name"]].get("args") or [] if word in kept][: len(kept)] == kept
            assert after[one["name"]].get("command") == one.get("command")
