"""What a managed store needs, from the pool's spec and the operator's settings: image and memory.

Why this exists: the builders take finished numbers, and people get the arithmetic in one sentence. A node's
memory is requested and limited alike: it must never be killed for what its neighbours use.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from kvshare_operator.api.pool import Rdma, Spec
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.quantity import MIB, as_quantity, bytes_of
from kvshare_operator.core.store.identity import master_address
from kvshare_operator.core.store.settings import StoreSettings

GIB: Final = 1024 * MIB
BUFFER_BYTES: Final = 64 * MIB
"""The client's own buffer (MOONCAKE_LOCAL_BUFFER_SIZE)."""
SEGMENT_STEP: Final = 16 * MIB
"""Segments are a multiple of Mooncake's default segment size."""
MASTER_REQUEST: Final = GIB
"""Memory that the master is sure to have; its limit is larger."""
MOST_NODES: Final = 256
_LEAST_OVERHEAD: Final = GIB
_LARGEST_BYTES: Final = 2**53
"""Larger sizes are typing errors, and Mooncake reads them through a floating-point number."""


@dataclasses.dataclass(frozen=True)
class StorePlan:
    """Everything that the builders need.

    Attributes:
        pool, namespace, uid: the owner.
        address: `host:port` of the master.
        image: image with `mooncake_master` and Mooncake's Python package.
        nodes: number of store nodes.
        capacity_bytes: cache memory of each node.
        node_bytes: memory request and limit of each node.
        master_bytes: memory limit of the master.
        node_selector: where store nodes may run.
        rdma: device resource of RDMA stores; None with TCP, or when nodes need none.
        protocol: `tcp` or `rdma`.
        pull_secrets: names, without repeats.
    """

    pool: str
    namespace: str
    uid: str
    address: str
    image: str
    nodes: int
    capacity_bytes: int
    node_bytes: int
    master_bytes: int
    node_selector: tuple[tuple[str, str], ...]
    rdma: Rdma | None
    protocol: str
    pull_policy: str
    pull_secrets: tuple[str, ...]
    run_as_user: int
    operator_namespace: str


def plan_store(namespace: str, pool: str, uid: str, spec: Spec, settings: StoreSettings) -> StorePlan | Refusal:
    """Return the plan of a pool with ``store.type: Managed``, or why there is none."""
    managed = spec.store.managed
    if managed is None:
        return refusal("SpecInvalid", problem="store.managed is missing")
    image = managed.image or settings.image
    if not image:
        return refusal("StoreImageMissing")
    capacity = bytes_of(managed.capacity_per_node) // SEGMENT_STEP * SEGMENT_STEP
    if not SEGMENT_STEP <= capacity <= _LARGEST_BYTES:
        problem = f"store.managed.capacityPerNode: {managed.capacity_per_node} given, 16Mi to 8Pi expected"
        return refusal("SpecInvalid", problem=problem)
    secrets = [*(one.name for one in spec.connector.image_pull_secrets or []), *settings.pull_secrets]
    return StorePlan(
        pool=pool,
        namespace=namespace,
        uid=uid,
        address=master_address(namespace, pool),
        image=image,
        nodes=managed.nodes,
        capacity_bytes=capacity,
        node_bytes=node_memory(capacity),
        master_bytes=master_limit(capacity),
        node_selector=tuple(sorted((managed.node_selector or {}).items())),
        rdma=spec.store.rdma,
        protocol=spec.store.protocol.lower(),
        pull_policy=settings.pull_policy,
        pull_secrets=tuple(dict.fromkeys(secrets)),
        run_as_user=settings.run_as_user,
        operator_namespace=settings.operator_namespace,
    )


def node_memory(capacity_bytes: int) -> int:
    """Return a node's memory: capacity, the client's buffer, and 10 % but at least 1 GiB; in whole MiB."""
    total = capacity_bytes + BUFFER_BYTES + max(_LEAST_OVERHEAD, -(-capacity_bytes // 10))
    return -(-total // MIB) * MIB


def master_limit(capacity_bytes: int) -> int:
    """Return the master's memory limit: 1 GiB, and 1 MiB for each GiB that the most nodes could hold; at most 16 GiB.

    That is about 2 KiB for an object of 2 MiB. It does not depend on the number of nodes: scaling them must not
    restart the master, which would empty the cache.
    """
    return min(MASTER_REQUEST + -(-capacity_bytes * MOST_NODES // GIB) * MIB, 16 * GIB)


def memory_sentence(plan: StorePlan) -> str:
    """Say what a node asks for, and why."""
    capacity, total = as_quantity(plan.capacity_bytes), as_quantity(plan.node_bytes)
    return f"each of {plan.nodes} node(s) needs {total} of memory for a capacity of {capacity}"
