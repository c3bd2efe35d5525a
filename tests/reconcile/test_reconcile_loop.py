"""The loop over an API server in memory: late CRD, dead watches, steady state, errors, and what it never does."""

from __future__ import annotations

import asyncio
import copy
import pathlib
import re
from typing import Any

import pytest

from kvshare_operator.api import names
from kvshare_operator.core.injection.record import of_refusal
from kvshare_operator.core.pool.status import Reach
from kvshare_operator.edges import metrics, reconcile_loop, store_probe
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.gather import ClusterState, Gatherer
from kvshare_operator.edges.memory_api import MemoryClusterApi
from kvshare_operator.edges.reconcile_loop import ReconcileLoop
from pods import SETTINGS, Json, injected, pod_p0, pool_p1, refused

POOL = "/apis/kvshare.dev/v1alpha1/namespaces/ns-a/kvsharepools/p1"
POOLS = "/apis/kvshare.dev/v1alpha1/kvsharepools"
POD = "/api/v1/namespaces/ns-a/pods/p0"
EVENTS = "/api/v1/namespaces/ns-a/events"


@pytest.fixture(autouse=True)
def store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is made in these tests."""

    async def connect(_: str, **__: object) -> Reach:
        return Reach(True)

    monkeypatch.setattr(store_probe, "connect", connect)


def loop_over(api: MemoryClusterApi, full_pass: float = 0.0, sweep: float = 0.0) -> ReconcileLoop:
    """A loop whose passes are always due, without certificates."""
    state = ClusterState()
    return ReconcileLoop(Gatherer(api, state, SETTINGS.connector_image), None, full_pass, sweep)


def turns(loop: ReconcileLoop, count: int = 1) -> None:
    """Let the loop take turns."""

    async def run() -> None:
        for _ in range(count):
            await loop.turn()

    asyncio.run(run())


def status_writes(api: MemoryClusterApi) -> int:
    """How often the pool's status was written."""
    return api.calls.count(("PATCH", f"{POOL}/status"))


def member_pod(name: str = "p0", **changes: Any) -> Json:
    """An injected pod as the API server keeps it."""
    pod = copy.deepcopy(injected(pod_p0()).pod)
    pod["metadata"].update({"name": name, "uid": f"uid-{name}", **changes})
    return pod


def test_pool_gets_its_status_and_ten_more_looks_write_nothing() -> None:
    """B61, F1: steady means silent."""
    api = MemoryClusterApi({POOL: pool_p1()})
    loop = loop_over(api)
    turns(loop)
    assert api.objects[POOL]["status"]["storeTPSize"] == 4
    assert api.objects[POOL]["status"]["observedGeneration"] == 1
    turns(loop, 10)
    assert status_writes(api) == 1


def test_change_is_seen_though_the_watch_is_dead() -> None:
    """B57: the full pass lists again."""
    api = MemoryClusterApi({POOL: pool_p1()})
    loop = loop_over(api)
    turns(loop)
    api.objects[POOL]["spec"]["prefill"] = {"tensorParallelSizes": [8]}
    api.objects[POOL]["spec"]["storeTPSize"] = 8
    api.objects[POOL]["metadata"]["generation"] = 2
    turns(loop)
    assert api.objects[POOL]["status"]["storeTPSize"] == 8
    assert api.objects[POOL]["status"]["observedGeneration"] == 2


def test_cluster_without_the_resource_is_waited_for() -> None:
    """The CRD may be installed after the operator."""
    api = MemoryClusterApi()
    api.faults[POOLS] = ApiError(404, "no such resource")
    loop = loop_over(api)
    turns(loop)
    assert api.writes == []
    del api.faults[POOLS]
    api.objects[POOL] = pool_p1()
    turns(loop)
    assert status_writes(api) == 1


def test_loop_that_is_stopped_in_the_moment_of_a_change_ends() -> None:
    """The process would otherwise work on until it is killed, beside the one that takes its place."""

    async def run() -> None:
        loop = loop_over(MemoryClusterApi({POOL: pool_p1()}), full_pass=600.0, sweep=600.0)
        waits = asyncio.Event()
        wait = loop.state.changed.wait

        async def noted() -> bool:
            waits.set()
            return bool(await wait())

        loop.state.changed.wait = noted  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(loop.run())
        await waits.wait()
        loop.state.changed.set()
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=20)
        assert done
        assert task.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("step", ["list_pools", "sweep", "list_members"])
def test_error_of_ours_in_a_pass_ends_no_loop(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whatever an object looks like: it is counted as a fault, and the pass is tried again."""
    api = MemoryClusterApi({POOL: pool_p1()})
    loop = loop_over(api, sweep=0.0)
    monkeypatch.setattr(reconcile_loop, "_RETRY_SECONDS", 0.0)
    right = getattr(loop.gatherer, step)
    raised: list[str] = []

    async def once_wrong() -> Any:
        if not raised:
            raised.append(step)
            raise TypeError("an object that nobody has thought of")
        return await right()

    monkeypatch.setattr(loop.gatherer, step, once_wrong)
    for one in loop._every:
        if one.name == "full pass":
            one.action = loop.gatherer.list_pools
    before = metrics.RECONCILES.labels("fault")._value.get()

    async def run() -> None:
        await loop._seed()
        for _ in range(2):
            await loop.turn()

    asyncio.run(run())
    assert raised == [step]
    assert metrics.RECONCILES.labels("fault")._value.get() == before + 1
    assert api.objects[POOL]["status"]["storeTPSize"] == 4


def test_members_arrive_by_watch_and_leave() -> None:
    """Events only mark; the next turn writes."""
    api = MemoryClusterApi({POOL: pool_p1(), POD: member_pod()})
    loop = loop_over(api)
    loop.state.member_event("ADDED", member_pod())
    turns(loop)
    assert api.objects[POOL]["status"]["members"]["unreported"] == 1
    loop.state.member_event("DELETED", member_pod())
    turns(loop)
    assert api.objects[POOL]["status"]["members"]["total"] == 0


LWS = "leaderworkerset.sigs.k8s.io"
HOSTILE: dict[str, Json] = {
    "a group of ² pods": {"labels": {f"{LWS}/name": "g"}, "annotations": {f"{LWS}/size": "\u00b2"}},
    "a group of more digits than Python reads": {
        "labels": {f"{LWS}/name": "g"},
        "annotations": {f"{LWS}/size": "9" * 5000},
    },
    "a record nested without end": {"annotations": {names.INJECTED: "[" * 100_000}},
    "a record of one number": {"annotations": {names.INJECTED: "9" * 5000}},
    "a Store TP of ²": {"args": ["--kv-transfer-config.kv_connector_extra_config.store_tp_size=\u00b2"]},
    "settings nested without end": {"args": ['{"kv_connector": "KVShareConnector", "x": ' + "[" * 100_000]},
    "a record of another shape": {"annotations": {names.INJECTED: '{"pool": "p1", "revision": [1], "storeTP": 1e400}'}},
    "a record of great length": {
        "annotations": {names.INJECTED: '{"pool": "p1", "revision": "' + "x" * 200_000 + '"}'}
    },
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("labelled", [True, False])
def test_pod_that_somebody_wrote_by_hand_stops_no_pool(change: Json, labelled: bool) -> None:
    """B05, B60: annotations are free text, and the controller reads those of every pod that opts in."""
    pod = member_pod()
    for field in ("labels", "annotations"):
        pod["metadata"][field] |= change.get(field, {})
    pod["spec"]["containers"][0]["args"] += change.get("args", [])
    if not labelled:
        del pod["metadata"]["labels"][names.MEMBER]
    api = MemoryClusterApi({POOL: pool_p1(), POD: pod})
    loop = loop_over(api)
    asyncio.run(loop._seed())
    turns(loop, 2)
    assert api.objects[POOL]["status"]["members"]["total"] == 1
    assert status_writes(api) == 1


def test_pod_that_cannot_be_read_at_all_is_left_out() -> None:
    """Whatever a pod is like, the others count."""
    api = MemoryClusterApi({POOL: pool_p1(), POD: member_pod(ownerReferences="x"), f"{POD}-2": member_pod("p0-2")})
    loop = loop_over(api)
    asyncio.run(loop._seed())
    turns(loop)
    assert api.objects[POOL]["status"]["members"]["total"] == 1


def test_member_whose_end_was_missed_is_forgotten_by_the_sweep() -> None:
    """A watch that was down for a moment."""
    api = MemoryClusterApi({POOL: pool_p1(), POD: member_pod()})
    loop = loop_over(api)
    loop.state.member_event(None, member_pod())
    turns(loop)
    assert api.objects[POOL]["status"]["members"]["total"] == 1
    del api.objects[POD]
    turns(loop)
    assert api.objects[POOL]["status"]["members"]["total"] == 0


def test_event_that_changes_nothing_marks_nothing() -> None:
    """Kubelets touch pods all the time."""
    loop = loop_over(MemoryClusterApi())
    loop.state.member_event("ADDED", member_pod())
    loop.state.dirty.clear()
    loop.state.member_event("MODIFIED", member_pod(resourceVersion="99"))
    assert loop.state.dirty == set()


def test_pod_that_was_missed_is_found_by_the_sweep_and_forgotten_when_it_goes() -> None:
    """B53, F10."""
    api = MemoryClusterApi({POOL: pool_p1()})
    bare = pod_p0()
    bare["metadata"]["uid"] = "uid-bare"
    api.objects[POD] = bare
    loop = loop_over(api)
    turns(loop)
    (problem,) = api.objects[POOL]["status"]["problems"]
    assert (problem["owner"], problem["reason"]) == ("pod/p0", "NotInjected")
    del api.objects[POD]
    turns(loop)
    assert api.objects[POOL]["status"]["problems"] == []


def test_refused_write_of_one_pool_does_not_stop_others() -> None:
    """One broken object is one object's trouble."""
    other = pool_p1()
    other["metadata"] = {**other["metadata"], "name": "p2", "uid": "other-uid"}
    second = POOL.replace("p1", "p2")
    api = MemoryClusterApi({POOL: pool_p1(), second: other})
    api.faults[f"{POOL}/status"] = ApiError(422, "invalid")
    loop = loop_over(api)
    turns(loop)
    assert "status" in api.objects[second]
    assert "status" not in api.objects[POOL]


def test_status_that_is_never_taken_is_told_once_and_not_tried_again_until_the_pool_is_edited() -> None:
    """B60: one event, one attempt for each generation; an edit that mends the pool is written."""
    api = MemoryClusterApi({POOL: pool_p1(prefill={"tensorParallelSizes": "4,2"})})
    api.faults[f"{POOL}/status"] = ApiError(500, "failed to create typed live object: expected list, got 4,2")
    loop = loop_over(api)
    turns(loop, 5)
    assert status_writes(api) == 1
    (event,) = [one for path, one in api.objects.items() if path.startswith(EVENTS)]
    assert (event["reason"], event["involvedObject"]["name"]) == ("SpecInvalid", "p1")
    assert "tensorParallelSizes" in event["message"]
    mended = pool_p1()
    mended["metadata"]["generation"] = 2
    api.objects[POOL] = mended
    del api.faults[f"{POOL}/status"]
    turns(loop, 2)
    assert api.objects[POOL]["status"]["storeTPSize"] == 4


def test_failing_write_is_tried_again() -> None:
    """Conflicts and server errors pass."""
    api = MemoryClusterApi({POOL: pool_p1()})
    api.faults[f"{POOL}/status"] = ApiError(500, "etcd")
    loop = loop_over(api)
    turns(loop)
    api.faults.clear()
    turns(loop)
    assert status_writes(api) == 2
    assert api.objects[POOL]["status"]["storeTPSize"] == 4


def test_invalid_object_is_said_and_the_loop_goes_on() -> None:
    """B60."""
    api = MemoryClusterApi({POOL: pool_p1(prefill={"tensorParallelSizes": "4,2"})})
    loop = loop_over(api)
    turns(loop, 3)
    conditions = {one["type"]: one for one in api.objects[POOL]["status"]["conditions"]}
    assert conditions[names.ACCEPTED]["reason"] == "SpecInvalid"
    assert status_writes(api) == 1


def test_events_are_posted_for_changes_and_never_repeated() -> None:
    """One event when the store goes away, one when it is back."""
    api = MemoryClusterApi({POOL: pool_p1()})
    loop = loop_over(api)
    turns(loop)
    before = api.calls.count(("POST", EVENTS))
    turns(loop, 5)
    assert api.calls.count(("POST", EVENTS)) == before


def test_refused_pod_gets_one_event_with_its_reason() -> None:
    """Skip leaves a record, a warning and an event."""
    api = MemoryClusterApi({POOL: pool_p1()})
    pod = pod_p0()
    record = of_refusal("p1", refused(pod_p0(args=["-tp", "8"])))
    pod["metadata"]["uid"] = "uid-refused"
    pod["metadata"]["annotations"][names.INJECTED] = record.to_json()
    api.objects[POD] = pod
    turns(loop_over(api), 3)
    events = [one for path, one in api.objects.items() if path.startswith(EVENTS)]
    about_pods = [one for one in events if one["involvedObject"]["kind"] == "Pod"]
    assert [(one["reason"], one["involvedObject"]["name"]) for one in about_pods] == [("TPNotInPool", "p0")]


def test_only_status_and_events_are_written() -> None:
    """No finalizers, no annotations, no pods."""
    api = MemoryClusterApi({POOL: pool_p1(), POD: member_pod()})
    loop = loop_over(api)
    loop.state.member_event("ADDED", member_pod())
    turns(loop, 3)
    assert {path for _, path in api.writes} <= {f"{POOL}/status", EVENTS}
    assert "finalizers" not in api.objects[POOL]["metadata"]


def test_kopf_is_used_for_startup_events_and_indexes_only() -> None:
    """Its other decorators write finalizers and annotations, and two processes would fight over them."""
    package = pathlib.Path(store_probe.__file__).parents[1]
    used = set()
    for path in package.rglob("*.py"):
        used |= set(re.findall(r"kopf\.((?:on\.)?[a-z]\w*)", path.read_text()))
    handlers = {name for name in used if name.startswith("on.") or name in ("timer", "daemon", "index")}
    assert handlers == {"on.startup", "on.event", "index"}


def test_ten_thousand_members_are_small() -> None:
    """A member keeps what the status needs, not the pod."""
    state = ClusterState()
    pod = member_pod()
    for number in range(2000):
        pod["metadata"]["uid"] = f"uid-{number}"
        state.member_event("ADDED", pod)
    members = state.members_of(("ns-a", "p1"))
    assert len(members) == 2000
    assert all(len(repr(one)) < 1500 for one in members[:10])
