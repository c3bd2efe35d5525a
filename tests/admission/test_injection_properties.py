"""Properties of every injection: it only adds, it is idempotent, and it leaves alone what it does not know."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvshare_operator.core.injection.inject import Injected
from kvshare_operator.core.injection.patch import difference
from pods import Json, pod_p0, pool_p1, run

WORD = st.text("abcxyz-=/.$ '\"", max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORD, lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
UNKNOWN = st.dictionaries(st.sampled_from(["x-new", "x-field", "futureThing"]), JSON, max_size=2)
FLAG = st.sampled_from(
    [
        ["-tp", "2"], ["--tensor-parallel-size=4"], ["--tensor_parallel_size", "8"], ["--block-size", "16"],
        ["--block-size=32"], ["--enforce-eager"], ["--config", "f.yaml"], ["--revision", "r"], ["--model", "org/m"],
        ["--kv-transfer-config", "{}"], ["-O3"], ["--served-model-name", "a", "b"], ["$(X)"], ["--"],
    ]
)  # fmt: skip
ARGS = st.lists(FLAG, max_size=4).map(lambda parts: [word for part in parts for word in part])
SCRIPT = st.sampled_from(
    [
        "vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
        'exec vllm serve org/m "$@"',
        "vllm serve org/m",
        "sleep 1",
        "ray start",
    ]
)
COMMAND = st.one_of(
    st.just(["vllm", "serve", "org/m"]),
    st.just(["tini", "--", "vllm", "serve", "org/m"]),
    st.just(None),
    SCRIPT.map(lambda script: ["bash", "-c", script]),
)
ENV = st.lists(
    st.builds(
        lambda name, value: {"name": name, **value},
        st.sampled_from(["A", "B", "PYTHONPATH", "PYTHONHASHSEED", "KVSHARE_VLLM_ARGS"]),
        st.sampled_from([{"value": "7"}, {"value": "$(A)"}, {}, {"valueFrom": {"fieldRef": {"fieldPath": "x"}}}]),
    ),
    max_size=3,
    unique_by=lambda entry: entry["name"],
)
VOLUMES = st.lists(st.sampled_from(["data", "kvshare-payload"]), max_size=2, unique=True)


@st.composite
def pods(draw: st.DrawFn) -> Json:
    """Pods of many forms, with fields that nobody knows."""
    pod = pod_p0(command=draw(COMMAND), args=draw(ARGS), env=draw(ENV), **draw(UNKNOWN))
    pod["spec"].update(draw(UNKNOWN))
    pod.update(draw(UNKNOWN))
    if volumes := draw(VOLUMES):
        pod["spec"]["volumes"] = [{"name": name, "emptyDir": {}} for name in volumes]
    if draw(st.booleans()):
        pod["spec"]["initContainers"] = [{"name": "download", "image": "x"}]
    if draw(st.booleans()):
        pod["metadata"]["labels"] = {"leaderworkerset.sigs.k8s.io/worker-index": draw(st.sampled_from(["0", "1"]))}
    return pod


def assert_only_adds(before: Any, after: Any, path: str = "") -> None:
    """Everything of ``before`` is in ``after``, in the same order; a PYTHONPATH may have grown in front."""
    if isinstance(before, dict):
        assert isinstance(after, dict)
        for key, value in before.items():
            assert_only_adds(value, after[key], f"{path}/{key}")
    elif isinstance(before, list):
        assert isinstance(after, list)
        for number, value in enumerate(before):
            assert_only_adds(value, after[number], f"{path}/{number}")
    elif isinstance(after, str) and after.startswith("/opt/kvshare:"):
        assert after == f"/opt/kvshare:{before}"
    else:
        assert before == after or before is None, path


@given(pods())
def test_injection_only_adds_and_is_idempotent(pod: Json) -> None:
    """B07, B34, B41: on any pod: all or nothing, and never a second time."""
    original = copy.deepcopy(pod)
    outcome = run(pod)
    assert pod == original
    if not isinstance(outcome, Injected):
        assert outcome.message
        assert outcome.remedy
        return
    assert_only_adds({**pod, "metadata": {}}, {**outcome.pod, "metadata": {}})
    again = run(outcome.pod)
    assert isinstance(again, Injected), again.sentence()
    assert difference(outcome.pod, again.pod) == []


@given(pods())
def test_same_input_gives_the_same_output(pod: Json) -> None:
    """No clock, no chance, no order of dictionaries."""
    assert run(pod) == run(copy.deepcopy(pod), pool_p1())
