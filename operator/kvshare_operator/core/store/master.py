"""Mooncake's master: a Deployment of one, and the Service that gives it a lasting address.

Two masters at a time would split the cache, hence Recreate. Every flag whose default matters to us is written
explicitly, so that another Mooncake version keeps the same behaviour. The HTTP port is not in the Service: it
can delete everything, and who may reach it is the network policy's business.
"""

from __future__ import annotations

from typing import Any, Final

from kvshare_operator.core.store import pods
from kvshare_operator.core.store.identity import METRICS_PORT, RPC_PORT
from kvshare_operator.core.store.plan import MASTER_REQUEST, StorePlan

Json = dict[str, Any]

FLAGS: Final = (
    "--rpc_address=$(POD_IP)",
    f"--rpc_port={RPC_PORT}",
    f"--metrics_port={METRICS_PORT}",
    # The default, at most 4 and never more than cores, left single clients without an answer for seconds under load.
    "--rpc_thread_num=8",
    # A dead node's keys fail for this long; a lower value starves heartbeats of busy nodes.
    "--client_ttl=10",
    # Longer than the slowest read of one batch, in milliseconds.
    "--default_kv_lease_ttl=10000",
    "--eviction_high_watermark_ratio=0.9",
    "--eviction_ratio=0.05",
    "--put_start_discard_timeout_sec=30",
    "--put_start_release_timeout_sec=600",
    "--enable_ha=false",
    "--enable_snapshot=false",
    "--enable_offload=false",
    "--enable_multi_tenants=false",
    "--enable_http_metadata_server=false",
    "--logtostderr=1",
)


def deployment(plan: StorePlan) -> Json:
    """Return the master's Deployment."""
    container = pods.container(
        plan,
        "master",
        "250m",
        (MASTER_REQUEST, plan.master_bytes),
        command=["mooncake_master"],
        args=list(FLAGS),
        env=[pods.own_address()],
        ports=[
            {"name": "rpc", "containerPort": RPC_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        readinessProbe={"tcpSocket": {"port": "rpc"}, "periodSeconds": 2, "timeoutSeconds": 2},
        livenessProbe={
            "httpGet": {"path": "/health", "port": "http"},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    )
    template = pods.pod_template(plan, "master", container, 5)
    return pods.workload(plan, "Deployment", "master", 1, template, strategy={"type": "Recreate"})


def service(plan: StorePlan) -> Json:
    """Return the Service behind the address that members get."""
    return pods.service(plan, "master", ("rpc", RPC_PORT), type="ClusterIP")
