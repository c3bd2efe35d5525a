"""The controller's loop with managed stores, over an API server in memory: made, mended, scaled, never stolen."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from kvshare_operator.api import names
from kvshare_operator.core.pool.status import Reach
from kvshare_operator.core.store.objects import object_path, store_objects
from kvshare_operator.core.store.settings import StoreSettings
from kvshare_operator.edges import store_probe
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.gather import ClusterState, Gatherer
from kvshare_operator.edges.memory_api import MemoryClusterApi
from kvshare_operator.edges.reconcile_loop import ReconcileLoop
from kvshare_operator.edges.store_keeper import StoreKeeper
from managed_pools import SETTINGS, plan, pool
from pods import Json

POOL = "/apis/kvshare.dev/v1alpha1/namespaces/ns-a/kvsharepools/p1"
PATHS = [object_path(one) for one in store_objects(plan())]
NODES = "/apis/apps/v1/namespaces/ns-a/statefulsets/kvs-p1-nodes"
MASTER = "/apis/apps/v1/namespaces/ns-a/deployments/kvs-p1-master"
SERVICE = "/api/v1/namespaces/ns-a/services/kvs-p1-master"


@pytest.fixture(autouse=True)
def master_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is made in these tests."""

    async def connect(_: str, **__: object) -> Reach:
        return Reach(True)

    monkeypatch.setattr(store_probe, "connect", connect)


class Place:
    """An API server in memory with pool p1, and a controller's loop over it."""

    def __init__(self, made: Json | None = None, settings: StoreSettings | None = SETTINGS) -> None:
        self.api = MemoryClusterApi({POOL: made or pool()})
        stores = None if settings is None else StoreKeeper(self.api, settings, fresh_seconds=0.0)
        self.loop = ReconcileLoop(Gatherer(self.api, ClusterState(), "i"), None, 0.0, 0.0, stores)

    def turn(self, count: int = 1) -> None:
        """Let the loop take turns."""

        async def run() -> None:
            for _ in range(count):
                await self.loop.turn()

        asyncio.run(run())

    def ready(self, nodes: int, master: int = 1) -> None:
        """Say that so many pods are ready."""
        self.api.objects[NODES]["status"] = {"readyReplicas": nodes, "replicas": 2}
        self.api.objects[MASTER]["status"] = {"readyReplicas": master, "replicas": 1}

    def pod(self, name: str, **status: Any) -> None:
        """Put a pod of the store there."""
        self.api.objects[f"/api/v1/namespaces/ns-a/pods/{name}"] = {
            "metadata": {"name": name, "namespace": "ns-a", "uid": name, "labels": {names.STORE: "p1"}},
            "status": status,
        }

    def condition(self, kind: str = names.STORE_REACHABLE) -> Json:
        """One condition of the pool."""
        found: Json = next(one for one in self.api.objects[POOL]["status"]["conditions"] if one["type"] == kind)
        return found

    def store_writes(self) -> list[str]:
        """What was written besides status and events."""
        return [path for method, path in self.api.writes if path in PATHS]


def test_pool_gets_its_store_and_ten_more_looks_write_nothing() -> None:
    """Everything once."""
    place = Place()
    place.turn()
    assert sorted(place.store_writes()) == sorted(PATHS)
    place.turn(10)
    assert len(place.store_writes()) == len(PATHS)
    assert len([path for _, path in place.api.writes if path.endswith("/status")]) == 1


def test_store_becomes_reachable_with_its_first_node_and_says_when_nodes_are_missing() -> None:
    """Starting, one of two, all."""
    place = Place()
    place.turn()
    assert (place.condition()["status"], place.condition()["reason"]) == ("False", "StoreStarting")
    assert place.condition(names.READY)["status"] == "False"
    assert place.condition(names.ACCEPTED)["status"] == "True"
    place.ready(1)
    place.turn()
    assert (place.condition()["status"], place.condition()["reason"]) == ("True", "NodesMissing")
    assert place.condition()["message"] == "1 of 2 store nodes are ready"
    place.ready(2)
    place.turn()
    assert (place.condition()["status"], place.condition()["reason"]) == ("True", "Reachable")
    assert place.condition(names.READY)["status"] == "True"


def test_master_that_does_not_answer_is_said_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready pods that the operator cannot reach: a network policy, a name."""

    async def connect(_: str, **__: object) -> Reach:
        return Reach(False, "no answer within 2 s")

    monkeypatch.setattr(store_probe, "connect", connect)
    place = Place()
    place.turn()
    place.ready(2)
    place.turn()
    assert place.condition()["reason"] == "StoreUnreachable"
    assert "kvs-p1-master.ns-a.svc:50051" in place.condition()["message"]


def test_scaling_changes_the_stateful_set_only() -> None:
    """Up and down; the master, and with it the cache, stays."""
    place = Place()
    place.turn()
    for count in (5, 1):
        before = len(place.store_writes())
        place.api.objects[POOL]["spec"]["store"]["managed"]["nodes"] = count
        place.turn()
        assert place.api.objects[NODES]["spec"]["replicas"] == count
        assert place.store_writes()[before:] == [NODES]


@pytest.mark.parametrize("path", PATHS)
def test_deleted_object_comes_back(path: str) -> None:
    """Whatever somebody removed."""
    place = Place()
    place.turn()
    del place.api.objects[path]
    before = len(place.store_writes())
    place.turn()
    assert place.store_writes()[before:] == [path]


def test_edit_by_hand_is_put_back() -> None:
    """`kubectl scale` does not win against the pool."""
    place = Place()
    place.turn()
    place.api.objects[NODES]["spec"]["replicas"] = 9
    place.turn()
    assert place.api.objects[NODES]["spec"]["replicas"] == 2


def test_object_of_somebody_else_is_never_touched() -> None:
    """Nor taken over from a pool of the same name that was deleted."""
    place = Place()
    theirs = {"kind": "Service", "metadata": {"name": "kvs-p1-master", "namespace": "ns-a"}, "spec": {"x": 1}}
    place.api.objects[SERVICE] = copy.deepcopy(theirs)
    place.turn(3)
    assert place.api.objects[SERVICE] == theirs
    assert place.condition()["reason"] == "StoreObjectForeign"
    assert "Service 'kvs-p1-master' exists" in place.condition()["message"]
    del place.api.objects[SERVICE]
    place.turn()
    assert place.condition()["reason"] == "StoreStarting"


def test_refusal_of_the_api_server_is_shown_in_its_own_words() -> None:
    """Quota, admission, a missing permission."""
    place = Place()
    place.api.faults[NODES] = ApiError(403, "exceeded quota: team, requested: memory=2Gi")
    place.turn(2)
    assert place.condition()["reason"] == "StoreRefused"
    assert "exceeded quota: team" in place.condition()["message"]


def test_api_server_in_trouble_is_tried_again() -> None:
    """No verdict about the store from that."""
    place = Place()
    place.api.faults[NODES] = ApiError(503, "later")
    place.turn()
    assert "status" not in place.api.objects[POOL]
    place.api.faults.clear()
    place.turn()
    assert place.condition()["reason"] == "StoreStarting"


def test_operator_without_managed_stores_says_so_and_writes_nothing() -> None:
    """The chart's switch."""
    place = Place(settings=None)
    place.turn()
    assert place.condition()["reason"] == "ManagedStoreDisabled"
    assert place.store_writes() == []


def test_store_without_an_image_says_where_to_name_one() -> None:
    """In the pool or in the chart."""
    place = Place(settings=StoreSettings())
    place.turn()
    assert place.condition()["reason"] == "StoreImageMissing"
    assert "store.managed.image" in place.condition()["message"]


def test_pool_with_an_external_store_gets_no_objects() -> None:
    """Nothing of ours beside somebody else's Mooncake."""
    external = {"type": "External", "external": {"masterAddress": "m.ns-a.svc:50051"}}
    made = pool()
    made["spec"]["store"] = external
    place = Place(made)
    place.turn(2)
    assert place.store_writes() == []
    assert place.condition()["reason"] == "Reachable"


def test_pool_that_is_being_deleted_gets_nothing_made() -> None:
    """The store goes with it."""
    made = pool()
    made["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    place = Place(made)
    place.turn(2)
    assert place.store_writes() == []


WAITING: dict[str, tuple[Json, str]] = {
    "no node with that much memory": (
        {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: 3 Insufficient memory."}]},
        "cannot be scheduled: 0/3 nodes: 3 Insufficient memory.",
    ),
    "an image that cannot be pulled": (
        {"containerStatuses": [{"image": "x:1", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "m"}}}]},
        "image x:1 cannot be pulled",
    ),
    "a container that ends": (
        {
            "containerStatuses": [
                {
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                    "lastState": {"terminated": {"reason": "Error", "exitCode": 7}},
                }
            ]
        },
        "ends again and again (exit code 7)",
    ),
    "a container that used too much": (
        {"containerStatuses": [{"state": {}, "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
        "was killed because it used more memory than its limit",
    ),
    "a user that is not allowed": (
        {"containerStatuses": [{"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "root"}}}]},
        "CreateContainerConfigError: root",
    ),
}


@pytest.mark.parametrize(("status", "words"), WAITING.values(), ids=WAITING.keys())
def test_pod_that_does_not_start_is_named_with_its_cause(status: Json, words: str) -> None:
    """And with what each node needs; the text does not change while nothing changes."""
    place = Place()
    place.turn()
    place.ready(0)
    place.pod("kvs-p1-nodes-0", **status)
    place.turn()
    message = place.condition()["message"]
    assert f"kvs-p1-nodes-0: {words}" in message
    assert "each of 2 node(s) needs 2112Mi of memory for a capacity of 1Gi" in message


def test_pods_that_are_not_even_made_are_counted() -> None:
    """A quota or a security policy refuses them, which only the StatefulSet's events tell."""
    place = Place()
    place.turn()
    place.ready(0)
    place.api.objects[NODES]["status"]["replicas"] = 0
    place.turn()
    assert "0 of 2 pods of StatefulSet kvs-p1-nodes exist, see its events" in place.condition()["message"]


def test_store_that_stays_incomplete_is_not_asked_about_all_the_time() -> None:
    """Often in its first minutes and after a change, then with the full pass only."""
    place = Place()
    stores = place.loop.stores
    assert stores is not None
    place.turn()
    assert stores.settling(place.api.objects[POOL])
    stores._waiting["pool-uid"] -= 400
    place.turn()
    assert not stores.settling(place.api.objects[POOL])
    place.api.objects[POOL]["spec"]["store"]["managed"]["nodes"] = 3
    place.turn()
    assert stores.settling(place.api.objects[POOL])


def test_many_broken_pods_make_a_short_message() -> None:
    """Three are named, the others counted."""
    place = Place()
    place.turn()
    place.ready(0)
    for number in range(9):
        place.pod(f"kvs-p1-nodes-{number}", conditions=[{"type": "PodScheduled", "status": "False", "message": "full"}])
    place.turn()
    assert "and 6 more pod(s)" in place.condition()["message"]
