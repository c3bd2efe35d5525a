"""What the operator counts: a pool's gauges follow its status, and go with the pool."""

from __future__ import annotations

import asyncio
import copy

import pytest
from prometheus_client import generate_latest

from kvshare_operator.core.pool.status import Reach
from kvshare_operator.edges import metrics, store_probe
from kvshare_operator.edges.gather import ClusterState, Gatherer
from kvshare_operator.edges.memory_api import MemoryClusterApi
from kvshare_operator.edges.reconcile_loop import ReconcileLoop
from pods import pod_p0, pool_p1

POOL = "/apis/kvshare.dev/v1alpha1/namespaces/ns-m/kvsharepools/p9"
POD = "/api/v1/namespaces/ns-m/pods/bare"


def shown(text: str) -> list[str]:
    """Lines of pool ns-m/p9 that contain a text."""
    lines = generate_latest(metrics.REGISTRY).decode().splitlines()
    return [line for line in lines if 'namespace="ns-m"' in line and text in line]


def test_gauges_of_a_pool_follow_its_status_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members, conditions, problems by reason; nothing is shown of what is over."""

    async def connect(_: str, **__: object) -> Reach:
        return Reach(False, "no answer")

    monkeypatch.setattr(store_probe, "connect", connect)
    pool, pod = pool_p1(), pod_p0()
    pool["metadata"].update(name="p9", namespace="ns-m")
    pod["metadata"].update(name="bare", namespace="ns-m", uid="bare", annotations={"kvshare.dev/pool": "p9"})
    api = MemoryClusterApi({POOL: pool, POD: pod})
    loop = ReconcileLoop(Gatherer(api, ClusterState(), "i"), None, 0.0, 0.0)

    async def turns(count: int) -> None:
        for _ in range(count):
            await loop.turn()

    asyncio.run(turns(2))
    assert shown("kvshare_operator_problem_pods")[0].endswith(" 1.0")
    assert 'reason="NotInjected"' in shown("kvshare_operator_problem_pods")[0]
    (reachable,) = shown('condition="StoreReachable"')
    (accepted,) = shown('condition="Accepted"')
    assert (reachable[-3:], accepted[-3:]) == ("0.0", "1.0")
    assert any('verdict="not_injected"' in line and line.endswith("1.0") for line in shown("kvshare_operator_members"))
    healed = copy.deepcopy(api.objects)
    del healed[POD]
    api.objects = healed
    asyncio.run(turns(2))
    assert shown("kvshare_operator_problem_pods") == []
    del api.objects[POOL]
    asyncio.run(turns(2))
    assert shown("") == []


def test_every_metric_has_our_prefix_and_a_sentence() -> None:
    """`kvshare_operator_*`; the reference page is made from these texts."""
    for family in metrics.REGISTRY.collect():
        assert family.name.startswith("kvshare_operator_")
        assert family.documentation.endswith(".")
