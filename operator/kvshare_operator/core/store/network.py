"""Who may connect to a managed store: one NetworkPolicy for the master, one for the nodes.

Members and nodes reach the RPC port and the data ports. The master's HTTP port is not protected by Mooncake and
can delete everything: only the controller reaches it. Policies add up, so monitoring is let in by one more
policy of the cluster's own. Kubelets, which probe, are let in by network plugins themselves.
"""

from __future__ import annotations

from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.core.store import pods
from kvshare_operator.core.store.identity import METRICS_PORT, RPC_PORT, selector
from kvshare_operator.core.store.plan import StorePlan

Json = dict[str, Any]

DATA_PORTS: Final = ((12300, 14300), (15000, 17000))
"""Mooncake's handshakes and transfers, inclusive."""


def master_policy(plan: StorePlan) -> Json:
    """Return the master's policy."""
    rpc = [{"port": RPC_PORT, "protocol": "TCP"}]
    return _policy(
        plan,
        "master",
        [
            {"from": [*_members_and_nodes(plan), _controller(plan)], "ports": rpc},
            {"from": [_controller(plan)], "ports": [{"port": METRICS_PORT, "protocol": "TCP"}]},
        ],
    )


def nodes_policy(plan: StorePlan) -> Json:
    """Return the nodes' policy."""
    ports = [{"port": first, "endPort": last, "protocol": "TCP"} for first, last in DATA_PORTS]
    return _policy(plan, "nodes", [{"from": _members_and_nodes(plan), "ports": ports}])


def _policy(plan: StorePlan, component: Any, ingress: list[Json]) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pods.metadata(plan, component),
        "spec": {
            "podSelector": {"matchLabels": selector(plan.pool, component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _members_and_nodes(plan: StorePlan) -> list[Json]:
    return [
        {"podSelector": {"matchLabels": {names.MEMBER: plan.pool}}},
        {"podSelector": {"matchLabels": selector(plan.pool, "nodes")}},
    ]


def _controller(plan: StorePlan) -> Json:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": plan.operator_namespace}},
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/name": "kvshare", "app.kubernetes.io/component": "controller"}
        },
    }
