"""The store's nodes: a StatefulSet, its headless Service, and a disruption budget.

A node lends its memory to the master. It leaves orderly on SIGTERM (its keys are forgotten at once); one that is
killed costs failed reads until the master drops it. Ready means that the node reaches the master; alive means
that its own HTTP server answers: a master's outage must not restart nodes.
"""

from __future__ import annotations

from typing import Any, Final

from kvshare_operator.core.store import pods
from kvshare_operator.core.store.identity import CLIENT_PORT, REST_PORT, selector
from kvshare_operator.core.store.plan import BUFFER_BYTES, StorePlan

Json = dict[str, Any]

_START_PERIODS: Final = 120
"""Five seconds each: a large segment is allocated and registered before the node answers."""


def stateful_set(plan: StorePlan) -> Json:
    """Return the nodes' StatefulSet."""
    container = pods.container(
        plan,
        "node",
        "500m",
        (plan.node_bytes, plan.node_bytes),
        command=["python3", "-m", "mooncake.mooncake_store_service"],
        args=[f"--port={REST_PORT}"],
        env=_environment(plan),
        ports=[{"name": "client", "containerPort": CLIENT_PORT, "protocol": "TCP"}],
        startupProbe=_probe("/metrics/summary", failureThreshold=_START_PERIODS),
        readinessProbe=_probe("/health", failureThreshold=2),
        livenessProbe=_probe("/metrics/summary", failureThreshold=12),
    )
    if plan.rdma is not None:
        for kind in ("requests", "limits"):
            container["resources"][kind][plan.rdma.resource_name] = str(plan.rdma.resource_count)
        if plan.rdma.ipc_lock == "Enabled":
            container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    more: Json = {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector(plan.pool, "nodes")},
            }
        ]
    }
    if plan.node_selector:
        more["nodeSelector"] = dict(plan.node_selector)
    return pods.workload(
        plan,
        "StatefulSet",
        "nodes",
        plan.nodes,
        pods.pod_template(plan, "nodes", container, 30, **more),
        serviceName=pods.metadata(plan, "nodes")["name"],
        podManagementPolicy="Parallel",
        updateStrategy={"type": "RollingUpdate"},
    )


def service(plan: StorePlan) -> Json:
    """Return the headless Service that a StatefulSet needs; nobody connects through it."""
    return pods.service(plan, "nodes", ("client", CLIENT_PORT), clusterIP="None")


def disruption_budget(plan: StorePlan) -> Json:
    """Return the budget: one node at a time may be drained, so that one share of the cache is lost at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": pods.metadata(plan, "nodes"),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(plan.pool, "nodes")},
        },
    }


def _environment(plan: StorePlan) -> list[Json]:
    values = {
        "MOONCAKE_MASTER": plan.address,
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_LOCAL_HOSTNAME": "$(POD_IP)",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(plan.capacity_bytes),
        "MOONCAKE_LOCAL_BUFFER_SIZE": str(BUFFER_BYTES),
        "MOONCAKE_PROTOCOL": plan.protocol,
        "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "true",
        "MOONCAKE_CLIENT_HTTP_PORT": str(CLIENT_PORT),
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if plan.protocol == "rdma":
        # Without a device Mooncake would silently use TCP.
        values |= {"MC_FORCE_HCA": "1", "MC_MS_AUTO_DISC": "1"}
    return [pods.own_address(), *({"name": name, "value": value} for name, value in values.items())]


def _probe(path: str, **more: int) -> Json:
    return {"httpGet": {"path": path, "port": "client"}, "periodSeconds": 5, "timeoutSeconds": 5, **more}
