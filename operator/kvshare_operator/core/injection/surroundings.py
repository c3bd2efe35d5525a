"""What around a pod can hurt an engine: Services whose link variables it would read, too little memory, odd devices.

Why this exists: both break engines in ways that nobody connects with their cause. Kubernetes gives every pod
variables for the Services of its namespace, and a Service `vllm` makes `VLLM_PORT=tcp://...`, which vLLM refuses
at start. Staging memory is host memory, which the container's limit must hold. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from kvshare_layout.config import ConnectorConfig
from kvshare_operator.api import names
from kvshare_operator.api.reasons import refusal
from kvshare_operator.core.injection.conflicts import ConflictError
from kvshare_operator.core.pool.view import PoolView
from kvshare_operator.core.quantity import MIB, bytes_of

COLLIDING_SERVICES: Final[dict[str, str]] = {
    "vllm": "VLLM_PORT",
    "vllm-dp-master": "VLLM_DP_MASTER_PORT",
    "vllm-nixl-side-channel": "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "vllm-p2p-side-channel": "VLLM_P2P_SIDE_CHANNEL_PORT",
    "vllm-ec-side-channel": "VLLM_EC_SIDE_CHANNEL_PORT",
    "vllm-mooncake-bootstrap": "VLLM_MOONCAKE_BOOTSTRAP_PORT",
    "mooncake-client-http": "MOONCAKE_CLIENT_HTTP_PORT",
    "mc-handshake": "MC_HANDSHAKE_PORT",
    "mc-store-client-min": "MC_STORE_CLIENT_MIN_PORT",
    "mc-store-client-max": "MC_STORE_CLIENT_MAX_PORT",
    "master": "MASTER_PORT",
}
"""Name of a Service -> the variable of vLLM, Mooncake or torch that its service link sets to `tcp://...`."""

_LARGE_PART: Final = 4
"""Staging above one part in so many of the memory limit is worth a warning: pods were sized without it."""


def link_warnings(pod: Mapping[str, Any], container: Mapping[str, Any], services: Collection[str]) -> list[str]:
    """Return a warning for each of ``services`` (of the pod's namespace) whose link variable the engine reads.

    A pod without service links, or a container that sets the variable itself, does not meet it.
    """
    if (pod.get("spec") or {}).get("enableServiceLinks") is False:
        return []
    own = {entry.get("name") for entry in container.get("env") or []}
    return [
        f"Service {name!r} in this namespace sets {variable}=tcp://... in the pod, which stops the engine: "
        "set enableServiceLinks: false in the pod, or rename the Service"
        for name, variable in COLLIDING_SERVICES.items()
        if name in services and variable not in own
    ]


def memory_warnings(container: Mapping[str, Any], ours: ConnectorConfig, ranks: int) -> list[str]:
    """Compare the host memory that the connector takes with the container's memory limit.

    It is (staging + Mooncake's client buffer) for each of ``ranks``; where GPUs are requested, no more ranks than
    GPUs run in the pod. Returns a warning when that is a large part of the limit. Raises ConflictError
    (MemoryTooSmall) when it leaves nothing for the engine, which would be killed.
    """
    resources = container.get("resources")
    limits = (resources if isinstance(resources, Mapping) else {}).get("limits") or {}
    try:
        limit = bytes_of(str(limits["memory"]))
    except (KeyError, ValueError, TypeError):
        return []
    gpus = _gpus(limits)
    here = min(ranks, gpus) if gpus else ranks
    each = ours.staging_bytes + ours.local_buffer_size
    needed = each * here
    if needed >= limit:
        raise ConflictError(
            refusal(
                "MemoryTooSmall",
                container=str(container.get("name", "")),
                needed=f"{needed // MIB} MiB",
                ranks=here,
                each=f"{each // MIB} MiB",
                limit=str(limits["memory"]),
            )
        )
    if needed * _LARGE_PART > limit:
        return [
            f"KVShare takes {needed // MIB} MiB ({here} rank(s) of {each // MIB} MiB) of the memory limit "
            f"{limits['memory']}: raise the limit, or lower connector.stagingMemoryPerRank of the pool"
        ]
    return []


def device_warnings(pool: PoolView, devices: str, ranks: int) -> list[str]:
    """Compare the annotation about network devices with the pool and the number of ranks.

    Returns a warning where it has no effect. Raises ConflictError (AnnotationInvalid) when lists for each rank are not
    as many as ranks, or as the ranks of one of several pods.
    """
    if not devices:
        return []
    if pool.spec.store.protocol != "RDMA":
        return [f"{names.NETWORK_DEVICES} has no effect: the pool's store.protocol is {pool.spec.store.protocol}"]
    lists = devices.count("/") + 1
    if lists > 1 and ranks % lists:
        raise ConflictError(
            refusal(
                "AnnotationInvalid",
                annotation=names.NETWORK_DEVICES,
                given=devices,
                expected=f"one list for all ranks, or as many as the pod has ranks ({ranks})",
            )
        )
    return []


def _gpus(limits: Mapping[str, Any]) -> int:
    """Whole GPUs that a container may use, by the usual names of device plugins; 0 when none is requested."""
    count = 0
    for name, amount in limits.items():
        if str(name).endswith("/gpu") and str(amount).isdigit():
            count += int(str(amount))
    return count
