"""From an AdmissionReview request to a response: who is asked, who is refused, and what never denies."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import jsonpatch
import pytest

from kvshare_operator.api import names
from kvshare_operator.core import review
from kvshare_operator.core.injection import inject
from pods import SETTINGS, Json, annotated, pod_p0, pool_p1, script_pod


def request(pod: Json, **fields: Any) -> Json:
    """An admission request that creates ``pod``."""
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    return {"uid": "u", "kind": kind, "namespace": "ns-a", "operation": "CREATE", "object": pod, **fields}


def answer(pod: Json, pool: Json | None, **fields: Any) -> review.Answer:
    """Review the creation of ``pod``."""
    return review.answer(request(pod, **fields), pool, SETTINGS)


def patched(pod: Json, answered: review.Answer) -> Json:
    """The pod after the response's patch."""
    encoded = answered.response.get("patch")
    operations = json.loads(base64.b64decode(encoded)) if encoded else []
    assert all(one["op"] in ("add", "replace") for one in operations)
    after: Json = jsonpatch.apply_patch(copy.deepcopy(pod), operations)
    return after


def test_opted_in_pod_is_patched_and_the_audit_log_says_so() -> None:
    """Allowed, with a JSON patch."""
    answered = answer(pod_p0(), pool_p1())
    assert answered.response["allowed"] is True
    assert answered.response["patchType"] == "JSONPatch"
    assert answered.response["auditAnnotations"]["decision"] == "injected"
    after = patched(pod_p0(), answered)
    assert after["metadata"]["labels"][names.MEMBER] == "p1"
    assert json.loads(after["metadata"]["annotations"][names.INJECTED])["storeTP"] == 4


def test_own_output_is_left_alone_also_beside_a_foreign_sidecar_and_label() -> None:
    """B07, B55: a second webhook call, or a second configuration, changes nothing."""
    for pod in (
        pod_p0(),
        script_pod("vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"),
        script_pod('vllm serve org/m -tp 2 "$@"'),
    ):
        once = patched(pod, answer(pod, pool_p1()))
        once["spec"]["containers"].append({"name": "sidecar", "image": "x", "command": ["proxy"]})
        once["metadata"]["labels"]["other"] = "label"
        again = answer(once, pool_p1())
        assert "patch" not in again.response
        assert again.decision == "unchanged"


NOT_OURS: dict[str, Json] = {
    "an update": {"operation": "UPDATE"},
    "a deletion": {"operation": "DELETE"},
    "a sub-resource": {"subResource": "status"},
    "another kind": {"kind": {"kind": "Deployment"}},
    "no object": {"object": None},
}


@pytest.mark.parametrize("fields", NOT_OURS.values(), ids=NOT_OURS.keys())
def test_request_that_is_none_of_our_business_is_allowed_untouched(fields: Json) -> None:
    """B04: even if a configuration sends it."""
    assert answer(pod_p0(), pool_p1(), **fields).response == {"allowed": True}


def test_mirror_pod_and_pod_without_annotation_are_left_alone() -> None:
    """B10: a mirror pod's change would set kubelet and API server apart."""
    mirror = pod_p0()
    mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "abc"
    assert answer(mirror, pool_p1()).response == {"allowed": True}
    plain = pod_p0()
    del plain["metadata"]["annotations"]
    assert answer(plain, pool_p1()).response == {"allowed": True}


def test_skip_admits_the_pod_as_it_was_with_one_record_and_a_warning() -> None:
    """The default: an engine without cache is better than none."""
    pod = pod_p0(args=["-tp", "8"])
    answered = answer(pod, pool_p1())
    after = patched(pod, answered)
    record = json.loads(after["metadata"]["annotations"].pop(names.INJECTED))
    assert after == pod
    assert record["reason"] == "TPNotInPool"
    assert answered.response["warnings"][0].startswith("kvshare: not injected: TPNotInPool")
    assert answered.response["auditAnnotations"] == {"decision": "skipped", "reason": "TPNotInPool"}


def test_misspelled_annotations_are_said_with_every_answer() -> None:
    """They may be the very cause of a refusal; what others call theirs is none of ours."""
    wrong, right = "kvshare.dev/tensor-paralel-size", names.TENSOR_PARALLEL_SIZE
    sentence = f"annotation {wrong} is not known and has no effect; {right} expected"
    pod = pod_p0()
    pod["metadata"]["annotations"] |= {wrong: "8", "kvshare.dev.example/x": "", names.REPORT_CA: "", names.ROLE: "both"}
    good = answer(pod, pool_p1()).response
    assert [text for text in good["warnings"] if "not known" in text] == [f"kvshare: {sentence}"]
    pod["spec"]["containers"][0]["args"] = ["-tp", "8"]
    assert answer(pod, pool_p1()).response["warnings"][1:] == [f"kvshare: {sentence}"]
    denied = answer(pod, pool_p1(onConflict="Reject")).response["status"]["message"]
    assert denied.endswith(f"; {sentence}")


def test_reject_denies_with_reason_and_remedy_and_changes_nothing() -> None:
    """A 4xx answer; no `reason: Invalid`, which would hide the message."""
    answered = answer(pod_p0(args=["-tp", "8"]), pool_p1(onConflict="Reject"))
    assert answered.response["allowed"] is False
    assert answered.response["status"]["code"] == 403
    assert "TPNotInPool" in answered.response["status"]["message"]
    assert "Add 8 to the pool" in answered.response["status"]["message"]
    assert "reason" not in answered.response["status"]
    assert "patch" not in answered.response


TROUBLE: dict[str, Json | None] = {
    "no such pool": None,
    "a pool without a Store TP": pool_p1(onConflict="Reject", model={"name": "org/m", "kvHeads": 7}),
    "a pool stored under looser rules": pool_p1(onConflict="Reject", prefill={"tensorParallelSizes": "4,2"}),
    "a pool with a bool for a size": pool_p1(onConflict="Reject", prefill={"tensorParallelSizes": [True]}),
    "a pool without a spec": {"metadata": {"name": "p1", "namespace": "ns-a"}},
}


@pytest.mark.parametrize("pool", TROUBLE.values(), ids=TROUBLE.keys())
def test_trouble_on_our_side_never_denies(pool: Json | None) -> None:
    """Whatever onConflict says."""
    answered = answer(pod_p0(), pool)
    assert answered.response["allowed"] is True
    assert answered.reason in ("PoolNotFound", "PoolNotReady")
    record = json.loads(patched(pod_p0(), answered)["metadata"]["annotations"][names.INJECTED])
    assert record["reason"] == answered.reason


def test_fault_of_ours_becomes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: a bug must not cost a pod."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(inject, "choose_container", broken)
    answered = answer(pod_p0(), pool_p1(onConflict="Reject"))
    assert answered.response["allowed"] is True
    assert answered.reason == "InternalError"
    assert "patch" not in answered.response


ODD: dict[str, Any] = {
    "no spec": {"metadata": {"annotations": {names.POOL: "p1"}}},
    "containers that are no list": {"metadata": {"annotations": {names.POOL: "p1"}}, "spec": {"containers": 3}},
    "a container without a name": pod_p0(name=None),
    "env entries that are text": pod_p0(env=["A=b"]),
    "args with numbers": pod_p0(args=["-tp", 2]),
    "a null command": {**pod_p0(), "spec": {"containers": [{"name": "vllm", "command": None, "args": None}]}},
}


@pytest.mark.parametrize("pod", ODD.values(), ids=ODD.keys())
def test_odd_objects_never_deny_and_never_raise(pod: Json) -> None:
    """The API server validates after us."""
    assert answer(pod, pool_p1()).response["allowed"] is True


def test_copied_record_is_not_trusted() -> None:
    """F7: YAML of a running pod, with a record that says it was refused or injected, is evaluated anew."""
    for stale in ('{"pool":"p1","reason":"TPNotInPool"}', '{"pool":"p1","storeTP":8,"revision":"x"}'):
        pod = annotated(pod_p0(), injected=stale)
        after = patched(pod, answer(pod, pool_p1()))
        assert json.loads(after["metadata"]["annotations"][names.INJECTED])["storeTP"] == 4


def test_flags_copied_from_another_revision_are_refused() -> None:
    """Only additions are ours to make, and two sets of flags would contradict each other."""
    old = patched(pod_p0(), answer(pod_p0(), pool_p1(storeTPSize=8)))
    assert answer(old, pool_p1()).reason == "FlagConflict"


def test_warnings_are_short_enough_for_clients() -> None:
    """Longer ones are cut by kubectl and API servers."""
    answered = answer(pod_p0(args=["--config", "/" + "x" * 300]), pool_p1())
    assert all(len(text) <= 256 for text in answered.response["warnings"])


@pytest.mark.parametrize("reaction", ["Skip", "Reject"])
def test_what_a_refusal_quotes_does_not_outgrow_an_annotation(reaction: str) -> None:
    """5.3: the API server denies pods whose annotations pass 256 KiB, also when ours is the one too many."""
    long = "m" * 200_000
    unknown = pod_p0()
    unknown["metadata"]["annotations"][names.POOL] = long
    for pod, pool in ((pod_p0(command=["vllm", "serve", long]), pool_p1(onConflict=reaction)), (unknown, None)):
        answered = answer(pod, pool)
        if answered.response["allowed"]:
            record = patched(pod, answered)["metadata"]["annotations"][names.INJECTED]
            assert len(record) < 2048
            assert json.loads(record)["reason"] in ("ModelMismatch", "PoolNotFound")
        else:
            assert len(answered.response["status"]["message"]) <= 2048
