"""Names, labels and the owner of a managed store's objects.

Why this exists: every name must be valid for a pool name of 63 characters and must follow from the pool's
name alone, because members get the master's address before anything runs. Nothing else may invent a name.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

from kvshare_operator.api import names

Json = dict[str, Any]
Component = Literal["master", "nodes"]

RPC_PORT: Final = 50051
METRICS_PORT: Final = 9003
CLIENT_PORT: Final = 9300
"""Health and metrics of a store node's client."""
REST_PORT: Final = 8080
"""A store node's REST interface; nobody of ours uses it, and the network policy keeps it closed."""

_LONGEST: Final = 50
"""A StatefulSet's name plus `-` and ten digits is a label value, which has 63 characters at most."""


def store_name(pool: str, component: Component) -> str:
    """Return the name of a component's objects: `kvs-POOL-master`, shortened with a hash for long pools.

    It starts with a letter, as a Service's name must, whatever the pool's name starts with.
    """
    full = f"kvs-{pool}-{component}"
    if len(full) <= _LONGEST:
        return full
    code = hashlib.sha256(pool.encode()).hexdigest()[:8]
    room = _LONGEST - len(f"kvs--{code}-{component}")
    return f"kvs-{pool[:room].rstrip('-')}-{code}-{component}"


def master_address(namespace: str, pool: str) -> str:
    """Return the address of the master as every member and node gets it."""
    return f"{store_name(pool, 'master')}.{namespace}.svc:{RPC_PORT}"


def selector(pool: str, component: Component) -> dict[str, str]:
    """Return the labels that select a component's pods; they never change."""
    return {names.STORE: pool, "app.kubernetes.io/component": f"store-{component}"}


def labels(pool: str, component: Component) -> dict[str, str]:
    """Return all labels of a component's objects and pods."""
    return {
        "app.kubernetes.io/name": "mooncake",
        "app.kubernetes.io/managed-by": names.CONTROLLER_MANAGER,
        **selector(pool, component),
    }


def owner(pool: str, uid: str) -> Json:
    """Return the reference with which the store is deleted together with its pool.

    It does not block the pool's deletion: that would need a permission, and nothing waits for the store.
    """
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": pool,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
