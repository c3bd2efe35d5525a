"""Pools as the webhook finds them: kopf's index first, the API server when the index knows none.

Why this exists: an index may lag behind `kubectl apply` by a moment, and "no such pool" must not be said
because of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from kvshare_operator.api import names
from kvshare_operator.edges.cluster_api import ApiError, ClusterApi

Json = dict[str, Any]


class Index(Protocol):
    """The part of kopf's index that is used: (namespace, name) -> stored pools."""

    def get(self, key: tuple[str, str], default: Any = None, /) -> Iterable[Json] | None:
        """Return what is stored under the key."""
        ...


def pools_path(namespace: str | None = None, name: str | None = None) -> str:
    """Return the API path of all pools, of a namespace's pools, or of one pool."""
    base = f"/apis/{names.GROUP}/{names.VERSION}"
    if namespace is not None:
        base += f"/namespaces/{namespace}"
    return f"{base}/{names.PLURAL}" + (f"/{name}" if name is not None else "")


def stored(body: Mapping[str, Any]) -> Json:
    """Return the parts of a pool that the operator uses, as plain data; managed fields are large."""
    metadata = body.get("metadata") or {}
    kept = {
        key: metadata[key]
        for key in ("namespace", "name", "uid", "generation", "resourceVersion", "deletionTimestamp")
        if key in metadata
    }
    return {"metadata": kept, "spec": _plain(body.get("spec")), "status": _plain(body.get("status"))}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


class PoolDirectory:
    """Looks pools up for reviews."""

    def __init__(self, api: ClusterApi, index: Index, namespaces: tuple[str, ...] = ()) -> None:
        self.api, self.index, self.namespaces = api, index, namespaces

    async def listed(self) -> bool:
        """Ask the API server for the pools once: afterwards look-ups can be trusted.

        A cluster without the CRD has no pools, which is an answer as well. Raises ApiError when there is none.
        """
        for namespace in self.namespaces or (None,):
            try:
                await self.api.call("GET", pools_path(namespace), query={"limit": "1"})
            except ApiError as error:
                if error.status != 404:
                    raise
        return True

    async def find(self, namespace: str, name: str) -> Json | None:
        """Return the raw pool, or None after the API server itself said that there is none. Raises ApiError."""
        for pool in self.index.get((namespace, name)) or ():
            return pool
        try:
            return await self.api.call("GET", pools_path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
