"""All reads of the controller: what the cluster holds, as one frozen input for each pool.

Why this exists: deciding needs one consistent value; collecting it needs watches, lists, and a connection
attempt. Nothing is decided here. Pods are kept as small members, not whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.pool import SpecError
from kvshare_operator.core.pool.members import Member, read_member
from kvshare_operator.core.pool.status import Gathered, Reach
from kvshare_operator.core.pool.view import PoolView, view
from kvshare_operator.core.server_version import Version, read_version
from kvshare_operator.edges.cluster_api import METADATA_ONLY, ApiError, ClusterApi
from kvshare_operator.edges.pool_index import pools_path, stored
from kvshare_operator.edges.store_probe import StoreProbe

log = logging.getLogger("kvshare.gather")
Json = dict[str, Any]
Key = tuple[str, str]
"""(namespace, name) of a pool."""

_CHUNK: Final = "500"
_RUNNING: Final = "status.phase!=Succeeded,status.phase!=Failed"


class ClusterState:
    """What watches and lists have brought in.

    Attributes:
        pools: raw pools by key.
        dirty: pools whose status must be looked at.
    """

    def __init__(self) -> None:
        self.pools: dict[Key, Json] = {}
        self.dirty: set[Key] = set()
        self.changed = asyncio.Event()
        self._members: dict[Key, dict[str, Member]] = {}
        self._left_out: dict[Key, dict[str, Member]] = {}
        self._key_of: dict[str, Key] = {}

    def mark(self, key: Key) -> None:
        """Have a pool looked at again."""
        self.dirty.add(key)
        self.changed.set()

    def pool_event(self, kind: str | None, body: Mapping[str, Any]) -> None:
        """Take in one watch event of a pool."""
        metadata = body.get("metadata") or {}
        key = (str(metadata.get("namespace")), str(metadata.get("name")))
        if kind == "DELETED":
            self.pools.pop(key, None)
            self.mark(key)
            return
        pool = stored(body)
        before = self.pools.get(key)
        self.pools[key] = pool
        if before is None or before["spec"] != pool["spec"] or before["status"] != pool["status"]:
            self.mark(key)

    def member_event(self, kind: str | None, body: Mapping[str, Any]) -> None:
        """Take in one watch event of an injected pod."""
        metadata = body.get("metadata") or {}
        uid = str(metadata.get("uid"))
        before_key = self._key_of.get(uid)
        before = self._members.get(before_key, {}).get(uid) if before_key else None
        member = None if kind == "DELETED" else _member(body)
        if member == before:
            return
        if before_key is not None:
            self._members[before_key].pop(uid, None)
            self._key_of.pop(uid, None)
            self.mark(before_key)
        if member is not None:
            key = (member.namespace, member.pool)
            self._members.setdefault(key, {})[uid] = member
            self._key_of[uid] = key
            self.mark(key)

    def member_uids(self) -> set[str]:
        """UIDs of all members that are known from events."""
        return set(self._key_of)

    def forget(self, uid: str) -> None:
        """Drop a member that no longer exists."""
        key = self._key_of.pop(uid, None)
        if key is not None:
            self._members[key].pop(uid, None)
            self.mark(key)

    def replace_left_out(self, found: list[Member]) -> list[Member]:
        """Take in the result of a sweep: pods that opted in and carry no label of ours. Return the new ones."""
        known = {uid for members in self._left_out.values() for uid in members}
        fresh: dict[Key, dict[str, Member]] = {}
        for member in found:
            fresh.setdefault((member.namespace, member.pool), {})[member.uid] = member
        for key in self._left_out.keys() | fresh.keys():
            if self._left_out.get(key) != fresh.get(key):
                self.mark(key)
        self._left_out = fresh
        return [member for member in found if member.uid not in known]

    def members_of(self, key: Key) -> tuple[Member, ...]:
        """Return all pods of a pool, with and without record."""
        return (*self._members.get(key, {}).values(), *self._left_out.get(key, {}).values())


class Gatherer:
    """Fills a ClusterState, and returns the input of one pool."""

    def __init__(
        self, api: ClusterApi, state: ClusterState, default_image: str, namespaces: tuple[str, ...] = ()
    ) -> None:
        self.api, self.state, self.default_image = api, state, default_image
        self.namespaces: tuple[str | None, ...] = namespaces or (None,)
        self.probe = StoreProbe()
        self._version: Version | None = None
        self._views: dict[Key, tuple[Json, PoolView | None]] = {}

    async def list_pools(self) -> None:
        """List all pools, as a watch may be dead without saying so. A missing CRD means no pools.

        The cluster's version is read as well: an upgrade changes what can be used.
        """
        self._version = read_version(await self.api.call("GET", "/version"))
        found: dict[Key, Json] = {}
        for namespace in self.namespaces:
            try:
                async for pool in self._pages(pools_path(namespace)):
                    kept = stored(pool)
                    found[kept["metadata"]["namespace"], kept["metadata"]["name"]] = kept
            except ApiError as error:
                if error.status != 404:
                    raise
        for key in self.state.pools.keys() - found.keys():
            self.state.pools.pop(key, None)
            self.state.mark(key)
        for key, pool in found.items():
            if self.state.pools.get(key) != pool:  # what is known about an unchanged one stays with the object
                self.state.pools[key] = pool
            self.state.mark(key)

    async def list_members(self) -> None:
        """List injected pods once, before the first status is computed."""
        for namespace in self.namespaces:
            async for pod in self._pages(_pods_path(namespace), {"labelSelector": names.MEMBER}):
                self.state.member_event(None, pod)

    async def sweep(self) -> list[Member]:
        """Look at the metadata of all running pods.

        Finds pods that opted in and were not injected, and forgets members that no longer exist: their end
        may have been missed. Returns the pods without injection that were seen first now.
        """
        known = self.state.member_uids()
        found: list[Member] = []
        alive: set[str] = set()
        for namespace in self.namespaces:
            async for pod in self._pages(_pods_path(namespace), {"fieldSelector": _RUNNING}, METADATA_ONLY):
                metadata = pod.get("metadata") or {}
                if names.MEMBER in (metadata.get("labels") or {}):
                    alive.add(str(metadata.get("uid")))
                elif (member := _member(pod)) is not None:
                    found.append(member)
        for uid in known - alive:
            self.state.forget(uid)
        return self.state.replace_left_out(found)

    async def look_at_stores(self, keys: Collection[Key]) -> dict[str, Reach]:
        """Return what the masters of these pools answer, by address. Never raises."""
        return await self.probe.look([address for key in keys if (address := self._address(key)) is not None])

    def _address(self, key: Key) -> str | None:
        try:
            seen = self.view(key)
        except Exception:  # whatever is wrong with a pool is said when its own turn comes
            return None
        return seen.resolution.master_address if seen is not None else None

    def view(self, key: Key) -> PoolView | None:
        """Return a pool, read and resolved once for each change; None when it is gone or breaks its schema."""
        pool = self.state.pools.get(key)
        if pool is None:
            self._views.pop(key, None)
            return None
        kept = self._views.get(key)
        if kept is None or kept[0] is not pool:
            seen: PoolView | None = None
            with contextlib.suppress(SpecError):
                seen = view(pool, self.default_image)
            kept = self._views[key] = (pool, seen)
        return kept[1]

    def gather(self, key: Key, reach: Reach) -> Gathered | None:
        """Return everything about one pool; None when it is gone."""
        pool = self.state.pools.get(key)
        if pool is None:
            return None
        return Gathered(
            pool=pool,
            members=self.state.members_of(key),
            reach=reach,
            default_image=self.default_image,
            now=datetime.datetime.now(datetime.UTC),
            server_version=self._version,
        )

    async def _pages(
        self, path: str, query: Mapping[str, str] | None = None, accept: str = "application/json"
    ) -> AsyncIterator[Json]:
        more = ""
        while True:
            asked = {**(query or {}), "limit": _CHUNK, **({"continue": more} if more else {})}
            page = await self.api.call("GET", path, query=asked, accept=accept)
            for item in page.get("items") or []:
                yield item
            more = str((page.get("metadata") or {}).get("continue") or "")
            if not more:
                return


def _member(pod: Mapping[str, Any]) -> Member | None:
    """Read a pod. One that cannot be read costs its pool a member, not every pool its controller."""
    try:
        return read_member(pod)
    except Exception:
        metadata = pod.get("metadata") or {}
        log.exception("pod %s/%s cannot be read", metadata.get("namespace"), metadata.get("name"))
        return None


def _pods_path(namespace: str | None) -> str:
    return "/api/v1/pods" if namespace is None else f"/api/v1/namespaces/{namespace}/pods"
