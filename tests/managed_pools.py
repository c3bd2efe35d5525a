"""Pools with managed stores, and their plans, for the tests beside this file."""

from __future__ import annotations

from typing import Any

from kvshare_operator.api.pool import read_spec
from kvshare_operator.api.reasons import Refusal
from kvshare_operator.core.store.plan import StorePlan, plan_store
from kvshare_operator.core.store.settings import StoreSettings
from pods import Json, pool_p1

SETTINGS = StoreSettings(image="example.org/mooncake:1", pull_policy="IfNotPresent")
RDMA = {"resourceName": "rdma/hca"}


def pool(managed: Json | None = None, **store: Any) -> Json:
    """Pool p1 with a managed store of two nodes; arguments replace fields."""
    fields = {"nodes": 2, "capacityPerNode": "1Gi", **(managed or {})}
    return pool_p1(store={"type": "Managed", "managed": fields, **store})


def outcome(made: Json, settings: StoreSettings = SETTINGS) -> StorePlan | Refusal:
    """What is planned for a pool."""
    metadata = made["metadata"]
    return plan_store(metadata["namespace"], metadata["name"], metadata["uid"], read_spec(made["spec"]), settings)


def plan(made: Json | None = None, settings: StoreSettings = SETTINGS) -> StorePlan:
    """The plan of a pool that has one."""
    found = outcome(made or pool(), settings)
    assert isinstance(found, StorePlan), found.sentence()
    return found


CASES: dict[str, tuple[Json, StoreSettings]] = {
    "tcp": (pool(), StoreSettings(image="example.org/mooncake:1", pull_policy="IfNotPresent")),
    "rdma": (
        pool(
            {"nodes": 4, "capacityPerNode": "256Gi", "image": "corp/mooncake:2", "nodeSelector": {"pool": "kv"}},
            protocol="RDMA",
            rdma=RDMA,
        ),
        StoreSettings(operator_namespace="kvs", pull_secrets=("corp", "corp"), run_as_user=0),
    ),
}
