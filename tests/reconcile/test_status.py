"""The status of a pool: every sentence that `kubectl describe kvsharepool` can say, from a frozen input."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import re
from typing import Any

import pytest

from kvshare_layout import reports
from kvshare_operator.api import names, reasons
from kvshare_operator.api.reasons import REASONS
from kvshare_operator.api.status import Condition, Status
from kvshare_operator.core.injection.record import Record, of_refusal
from kvshare_operator.core.pool.members import Member, Owner, read_member
from kvshare_operator.core.pool.status import Gathered, Reach, next_status
from kvshare_operator.core.pool.view import view
from kvshare_operator.edges.apply import as_json
from pods import SETTINGS, Json, injected, pod_p0, pool_p1, refused, run, script_pod

NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
VIEW = view(pool_p1(), SETTINGS.connector_image)
PREFIX = VIEW.resolution.cache_namespace
REACHED = Reach(True)
RESTART = "kubectl -n ns-a rollout restart deployment"


def said(**fields: Any) -> reports.MemberReport:
    """A report of a sharing member."""
    base: Json = {
        "pool_prefix": PREFIX, "verdict": "shared", "reason": "Shared", "message": "shares", "fingerprint": "a" * 32,
        "namespace": f"{PREFIX}/f-{'a' * 32}", "store_tp": 4, "tp": 2, "pp": 1, "rank_layouts": ("LBNHC",),
        "kv_heads": 8, "block_tokens": 16, "manifest": {"dtype": "float32", "weights": "w"},
    }  # fmt: skip
    return reports.MemberReport(**{**base, **fields})


def member(number: int = 1, owner: str = "decode", report: reports.MemberReport | None = None, **fields: Any) -> Member:
    """An injected member of pool p1."""
    record = Record("p1", VIEW.revision, 4, 2, "both", "vllm", PREFIX)
    base: Json = {
        "uid": f"uid-{number}", "namespace": "ns-a", "name": f"{owner}-{number}", "pool": "p1",
        "owner": Owner("deployment", owner), "record": record, "store_tp": 4, "cache_namespace": PREFIX,
    }  # fmt: skip
    return Member(**{**base, "report": report, **fields})


def status(*members: Member, reach: Reach = REACHED, pool: Json | None = None, now: datetime.datetime = NOW) -> Status:
    """The status of pool p1 with these members."""
    return next_status(Gathered(pool or pool_p1(), members, reach, SETTINGS.connector_image, now))


def condition(found: Status, kind: str) -> Condition:
    """One condition."""
    return next(one for one in found.conditions or [] if one.type == kind)


def test_pool_without_members_is_ready_when_its_store_answers() -> None:
    """The demo waits for that."""
    found = status()
    assert condition(found, names.READY).status == "True"
    assert condition(found, names.MEMBERS_CONSISTENT).reason == "NoMembers"
    assert (found.store_tp_size, found.cache_namespace, found.revision) == (4, PREFIX, VIEW.revision)


def test_image_volumes_on_an_old_or_unknown_cluster_are_not_accepted() -> None:
    """B48: the pool says so before any pod is refused."""
    pool = pool_p1(connector={"source": "ImageVolume"})
    for version, expected in (((1, 36), "True"), ((1, 30), "False"), (None, "False")):
        gathered = Gathered(pool, (), REACHED, SETTINGS.connector_image, NOW, version)
        accepted = condition(next_status(gathered), names.ACCEPTED)
        assert accepted.status == expected
        assert expected == "True" or accepted.reason == "ImageVolumeUnsupported"


def test_store_that_does_not_answer_makes_the_pool_not_ready_and_is_named() -> None:
    """Engines serve on; the address and the cause are in the message."""
    found = status(reach=Reach(False, "Connection refused"))
    assert condition(found, names.READY).reason == "StoreUnreachable"
    assert "mooncake-master.ns-a.svc:50051" in condition(found, names.STORE_REACHABLE).message


def test_sharing_members_are_counted_with_sizes_and_layouts() -> None:
    """One fingerprint, two layouts, two sizes."""
    found = status(member(1, "prefill", said(tp=4)), member(2, report=said(rank_layouts=("LBHNC",))), member(3))
    assert found.members is not None
    assert found.members.model_dump(exclude_defaults=True) == {"total": 3, "shared": 2, "unreported": 1}
    (group,) = found.fingerprints or []
    assert (group.members, group.tensor_parallel_sizes, group.layouts) == (2, [2, 4], ["LBHNC", "LBNHC"])
    consistent = condition(found, names.MEMBERS_CONSISTENT)
    assert (consistent.status, consistent.reason) == ("True", "Consistent")
    assert "1 have not reported" in consistent.message


def test_fingerprint_split_names_the_differing_fields() -> None:
    """B31: the commonest support case: no hits, and no error anywhere."""
    other = said(fingerprint="b" * 32, manifest={"dtype": "bfloat16", "weights": "w"})
    found = status(member(1, report=said()), member(2, report=said()), member(3, "prefill", report=other))
    consistent = condition(found, names.MEMBERS_CONSISTENT)
    assert consistent.reason == "FingerprintSplit"
    assert "dtype" in consistent.message
    assert "weights" not in consistent.message
    assert [group.differing_fields for group in found.fingerprints or []] == [None, ["dtype"]]
    assert [(one.owner, one.reason) for one in found.problems or []] == [("deployment/prefill", "FingerprintSplit")]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("hash_canary", "hash seed"), ("dtype", "dtype"), ("weights", "weights"),
        ("kind.full.tokens", "kind.full.tokens"), ("hash_scheme", "another vLLM version"),
    ],
)  # fmt: skip
def test_field_that_splits_the_pool_is_named_in_words_and_by_name(field: str, words: str) -> None:
    """B31: one member with another seed: the condition says so, the fingerprints keep the field's own name."""
    other = {"dtype": "float32", "weights": "w", field: "other"}
    found = status(member(1, "a", said()), member(2, "b", said(fingerprint="b" * 32, manifest=other)))
    assert condition(found, names.MEMBERS_CONSISTENT).reason == "FingerprintSplit"
    assert words in condition(found, names.MEMBERS_CONSISTENT).message
    assert [one.differing_fields for one in found.fingerprints or []] == [None, [field]]


def test_isolated_and_disabled_members_are_listed_with_their_own_reason() -> None:
    """Reason and message go through unchanged, with the command that restarts the owner."""
    found = status(
        member(1, "a", said(verdict="isolated", reason="ContextParallel", message="DCP 2")),
        member(2, "b", said(verdict="disabled", reason="MooncakeMissing", message="no module")),
    )
    assert found.members is not None
    assert (found.members.isolated, found.members.disabled) == (1, 1)
    assert condition(found, names.MEMBERS_CONSISTENT).reason == "MembersIsolated"
    assert [(p.owner, p.reason, p.message) for p in found.problems or []] == [
        ("deployment/a", "ContextParallel", f"isolated: DCP 2. Mend that, then: {RESTART}/a"),
        ("deployment/b", "MooncakeMissing", f"disabled: no module. Mend that, then: {RESTART}/b"),
    ]


def test_pod_without_record_is_not_injected_and_named_with_the_command() -> None:
    """B53: the webhook was away."""
    found = status(member(1, report=said()), member(2, "late", record=None, store_tp=None, cache_namespace=""))
    consistent = condition(found, names.MEMBERS_CONSISTENT)
    assert (consistent.status, consistent.reason) == ("False", "NotInjected")
    assert "kubectl -n ns-a rollout restart deployment/late" in consistent.message
    assert found.members is not None
    assert found.members.not_injected == 1


def test_refused_pod_is_listed_with_its_reason() -> None:
    """With onConflict: Skip it runs, and the pool says why it does not share."""
    record = of_refusal("p1", refused(pod_p0(args=["-tp", "8"])))
    found = status(member(1, "big", record=record, store_tp=None, cache_namespace=""))
    assert [(one.owner, one.reason) for one in found.problems or []] == [("deployment/big", "TPNotInPool")]
    assert condition(found, names.MEMBERS_CONSISTENT).reason == "TPNotInPool"


def test_older_revision_with_the_same_cache_is_outdated_and_consistent() -> None:
    """Restart when it suits."""
    old = dataclasses.replace(member(1, report=said()), record=Record("p1", "older", 4, 2, "both", "vllm", PREFIX))
    found = status(old)
    assert found.members is not None
    assert found.members.outdated == 1
    assert [one.reason for one in found.problems or []] == ["Outdated"]
    assert condition(found, names.MEMBERS_CONSISTENT).status == "True"


def test_other_store_tp_or_namespace_is_a_cache_split() -> None:
    """F9: old members do not hit the new ones' blocks."""
    for fields in ({"store_tp": 8}, {"cache_namespace": "kvs1/p-ffffffffffff/g1"}):
        found = status(member(1, report=said(), **fields))
        assert condition(found, names.MEMBERS_CONSISTENT).reason == "CacheSplit"
        assert "rollout restart" in condition(found, names.MEMBERS_CONSISTENT).message
        assert found.fingerprints == []


def test_store_tp_above_the_heads_is_no_split_once_they_are_reported() -> None:
    """S 8 for 4 heads means 4: normalised before it is compared."""
    pool = pool_p1(model={"name": "org/m"}, prefill={"tensorParallelSizes": [8, 2]})
    provisional = status(pool=pool)
    assert condition(provisional, names.STORE_TP_RESOLVED).reason == "Provisional"
    found = status(member(1, report=said(kv_heads=4, store_tp=4), store_tp=8), pool=pool)
    assert (found.store_tp_size, found.kv_heads) == (4, 4)
    assert condition(found, names.MEMBERS_CONSISTENT).status == "True"


def test_learnt_heads_stay_when_all_members_are_gone() -> None:
    """Otherwise Store TP would move with the last pod."""
    pool = pool_p1(model={"name": "org/m"}, prefill={"tensorParallelSizes": [8, 2]})
    pool["status"] = as_json(status(member(1, report=said(kv_heads=4)), pool=pool))
    assert status(pool=pool).store_tp_size == 4


def test_record_that_was_edited_by_hand_is_said_and_not_believed() -> None:
    """B05: the pod's own flags count."""
    edited = dataclasses.replace(
        member(1, report=said()), record=Record("p1", VIEW.revision, 8, 2, "both", "vllm", "x")
    )
    found = status(edited)
    assert [one.reason for one in found.problems or []] == ["RecordDiffers"]
    assert condition(found, names.MEMBERS_CONSISTENT).status == "True"


def test_workers_of_a_group_are_not_waited_for() -> None:
    """Only the leader reports."""
    worker = member(1, record=Record("p1", VIEW.revision, 4, None, "worker", "vllm", PREFIX), store_tp=None)
    found = status(worker, member(2, report=said()))
    assert found.members is not None
    assert (found.members.total, found.members.unreported) == (1, 0)


def test_spec_stored_under_looser_rules_is_said_and_keeps_the_rest() -> None:
    """B60: no crash, no guess."""
    for sizes in ("4,2", [0], [True], list(range(1, 40)), None):
        pool = pool_p1(prefill={"tensorParallelSizes": sizes})
        pool["status"] = as_json(status(member(1, report=said())))
        found = status(pool=pool)
        assert condition(found, names.ACCEPTED).reason == "SpecInvalid"
        assert "tensorParallelSizes" in condition(found, names.ACCEPTED).message
        assert condition(found, names.READY).status == "False"
        assert found.store_tp_size == 4


def test_damaged_status_is_no_obstacle() -> None:
    """It is the operator's own; it is written anew."""
    pool = pool_p1()
    pool["status"] = {"storeTPSize": "four", "conditions": 3, "members": None, "kvHeads": 8}
    assert as_json(status(pool=pool)) == as_json(status())


def test_unchanged_input_gives_the_same_status_at_any_time() -> None:
    """B61: transition times move with the status only, so nothing is written."""
    pool = pool_p1()
    first = status(member(1, report=said()), pool=pool)
    pool["status"] = json.loads(json.dumps(as_json(first)))
    later = status(member(1, report=said()), pool=pool, now=NOW + datetime.timedelta(days=1))
    assert as_json(later) == as_json(first)
    broken = status(member(1, report=said()), pool=pool, reach=Reach(False, "x"), now=NOW + datetime.timedelta(days=1))
    moved = {one.type for one in broken.conditions or [] if one.last_transition_time.startswith("2026-01-02")}
    assert moved == {names.STORE_REACHABLE, names.READY}


def test_status_stays_within_the_bounds_of_its_schema() -> None:
    """Many members, long names, long messages: cut, never refused by the API server."""
    many = [
        member(i, f"owner-{i}-{'x' * 400}", said(verdict="isolated", reason="R" * 64, message="m" * 1000))
        for i in range(60)
    ]
    splits = [
        member(100 + i, report=said(fingerprint=f"{i:032x}", manifest={f"f{j}": str(i) for j in range(40)}))
        for i in range(30)
    ]
    found = status(*many, *splits)
    assert Status.model_validate(as_json(found)) == found
    assert len(found.problems or []) == 20
    assert len(found.fingerprints or []) == 8


def test_every_reason_that_code_names_is_a_row_of_the_table() -> None:
    """The table is the only source."""
    package = pathlib.Path(reasons.__file__).parents[1]
    named = {code for path in package.rglob("*.py") for code in re.findall(r"refusal\(\s*\"(\w+)\"", path.read_text())}
    assert len(named) > 25
    assert named <= set(REASONS)


def test_every_reason_of_a_condition_is_a_word_and_every_row_has_texts() -> None:
    """Machines read reasons; people read messages and remedies."""
    for row in REASONS.values():
        assert row.code.isalnum()
        assert row.trigger.endswith(".")
        assert row.message
        assert row.remedy


def test_member_is_read_from_an_injected_pods_own_flags() -> None:
    """Through args or through our variable; bare pods and finished pods too."""
    for pod in (pod_p0(), script_pod("vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS")):
        after = injected(pod).pod
        after["metadata"]["uid"] = "u"
        found = read_member(after)
        assert found is not None
        assert (found.store_tp, found.cache_namespace, found.injected) == (4, PREFIX, True)
        assert found.owner == Owner("pod", "p0")
        assert not found.record_differs
    after["status"] = {"phase": "Succeeded"}
    assert read_member(after) is None
    assert run(pod_p0()) is not None


def test_owner_of_a_deployments_pod_is_the_deployment() -> None:
    """That is what a person restarts."""
    pod = pod_p0()
    pod["metadata"]["labels"] = {"pod-template-hash": "7d4"}
    pod["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "llama-7d4", "controller": True}]
    found = read_member(pod)
    assert found is not None
    assert found.owner.restart_command("ns-a") == "kubectl -n ns-a rollout restart deployment/llama"
