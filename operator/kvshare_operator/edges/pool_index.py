"""Pools as the webhook finds them: kopf's index first, the API server when the index knows none.

Why this exists: an index may lag behind `kubectl apply` by a moment, and "no such pool" must not be said
because of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from kvshare_operator.api import names
from kvshare_operator.edges.cluster_api import ApiError, ClusterApi

log = logging.getLogger("kvshare.pools")
_SERVED_SECONDS: Final = 10.0
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""What the API server takes for a name. Anything else, such as `../../other/kvsharepools/p`, is no part of a path."""

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


async def wait_until_served(api: ClusterApi, seconds: float = _SERVED_SECONDS) -> bool:
    """Wait for the resource, which `helm install` applies a moment before the processes start.

    A process that may not watch resources looks for it once. If it comes later still, pools are found by listing only,
    which is slower, until the process is restarted.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        with contextlib.suppress(ApiError):
            groups = (await api.call("GET", "/apis")).get("groups") or []
            if any(group.get("name") == names.GROUP for group in groups):
                found = (await api.call("GET", f"/apis/{names.API_VERSION}")).get("resources") or []
                if any(one.get("name") == names.PLURAL for one in found):
                    return True
        if asyncio.get_running_loop().time() >= deadline:
            log.warning(
                "%s.%s is not installed: changes of pools are noticed late until this process is restarted",
                names.PLURAL,
                names.GROUP,
            )
            return False
        await asyncio.sleep(0.2)


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
        """Return the raw pool, or None when the API server says that there is none, or can have none of that name.

        Raises ApiError.
        """
        if _NAME.fullmatch(name) is None:
            return None
        for pool in self.index.get((namespace, name)) or ():
            return pool
        try:
            return await self.api.call("GET", pools_path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
