"""Pools as reviews find them: the index first, and the API server before anybody says that there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvshare_operator.core import review
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.memory_api import MemoryClusterApi
from kvshare_operator.edges.pool_index import PoolDirectory
from pods import SETTINGS, Json, annotated, pod_p0, pool_p1

POOL = "/apis/kvshare.dev/v1alpha1/namespaces/ns-a/kvsharepools/p1"


def find(api: MemoryClusterApi, index: Any, name: str = "p1") -> Json | None:
    """Look a pool up."""
    return asyncio.run(PoolDirectory(api, index).find("ns-a", name))


def test_pool_of_the_index_costs_no_call() -> None:
    """Every pod of a rollout asks."""
    api = MemoryClusterApi()
    assert find(api, {("ns-a", "p1"): [pool_p1()]}) == pool_p1()
    assert api.calls == []


def test_pool_that_the_index_does_not_know_yet_is_asked_for() -> None:
    """B54: pool and Deployment are applied together, and the watch lags behind; also right after the start."""
    assert find(MemoryClusterApi({POOL: pool_p1()}), {}) == pool_p1()


def test_pool_is_missing_only_when_the_api_server_says_so() -> None:
    """5.3: 404 means none; anything else is trouble of ours, and never `PoolNotFound`."""
    assert find(MemoryClusterApi(), {}, "nope") is None
    for status in (0, 403, 500, 503):
        api = MemoryClusterApi()
        api.faults[POOL] = ApiError(status, "no")
        with pytest.raises(ApiError):
            find(api, {})


def test_pools_of_other_namespaces_are_not_found() -> None:
    """A pool is used in its own namespace only, whatever it is called."""
    assert find(MemoryClusterApi(), {("ns-b", "p1"): [pool_p1()]}) is None


NO_NAMES = ("../../ns-b/kvsharepools/p1", "p1/status", "p1?watch=1", "p1#x", "%2e%2e/p1", "..", "P1", "p1 ", "p" * 254)


@pytest.mark.parametrize("name", NO_NAMES)
def test_annotation_that_is_no_name_never_becomes_part_of_a_path(name: str) -> None:
    """A client that shortens `a/../b` would ask for a pool of another namespace."""
    api = MemoryClusterApi()
    assert find(api, {}, name) is None
    assert api.calls == []


def test_readiness_waits_for_the_first_list_and_takes_a_missing_resource_for_no_pools() -> None:
    """B50, B54: an API server that does not answer keeps the webhook out of its Service."""
    listed = "/apis/kvshare.dev/v1alpha1/kvsharepools"
    api = MemoryClusterApi()
    assert asyncio.run(PoolDirectory(api, {}).listed()) is True
    api.faults[listed] = ApiError(404, "the resource is not installed")
    assert asyncio.run(PoolDirectory(api, {}).listed()) is True
    api.faults[listed] = ApiError(503, "busy")
    with pytest.raises(ApiError):
        asyncio.run(PoolDirectory(api, {}).listed())


REASONS: dict[str, tuple[Json, Json | None, str]] = {
    "skipped": (pod_p0(args=["-tp", "8"]), pool_p1(), "TPNotInPool"),
    "denied": (pod_p0(args=["-tp", "8"]), pool_p1(onConflict="Reject"), "TPNotInPool"),
    "no pool": (pod_p0(), None, "PoolNotFound"),
    "a script": (pod_p0(command=["bash", "-c", "vllm serve org/m"]), pool_p1(), "ShellWrapper"),
    "an annotation": (annotated(pod_p0(), role="x"), pool_p1(), "RoleInvalid"),
}


@pytest.mark.parametrize(("pod", "pool", "reason"), REASONS.values(), ids=REASONS.keys())
def test_audit_log_and_warning_carry_the_reason(pod: Json, pool: Json | None, reason: str) -> None:
    """5.3: the same code in audit annotation, warning or denial, and metric label."""
    request = {"uid": "u", "namespace": "ns-a", "operation": "CREATE", "object": pod}
    answered = review.answer(request, pool, SETTINGS)
    assert answered.response["auditAnnotations"]["reason"] == reason
    told = answered.response.get("warnings", [answered.response.get("status", {}).get("message")])[0]
    assert reason in told
    assert answered.reason == reason
