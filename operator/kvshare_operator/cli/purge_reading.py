"""What `kvshare purge` reads: who refers to which keys in a cluster, and the keys of a store.

Why this exists: whatever cannot be read makes deleting impossible, and must be told apart from what is not there.
The keys come from the HTTP port of the store's master: through the API server to the master's pod, or from an address
that the user gives, such as the near end of a port-forward.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.pool import SpecError
from kvshare_operator.api.status import read_status
from kvshare_operator.cli.check_reading import CannotReadError, NotInstalledError, list_all
from kvshare_operator.core.pool.members import Member, read_member
from kvshare_operator.core.pool.view import view
from kvshare_operator.core.store import identity
from kvshare_operator.core.store.leftovers import Group, Reference, prefix_of
from kvshare_operator.edges.cluster_api import TEXT, ApiError

if TYPE_CHECKING:
    from kvshare_operator.edges.cluster_api import ClusterApi

Json = dict[str, Any]
_POOLS: Final = f"/apis/{names.API_VERSION}"
_SERVICE: Final = re.compile(r"(?P<name>[a-z0-9-]+)\.(?P<namespace>[a-z0-9-]+)\.svc(\.[a-z0-9.-]+)?:\d+")
_MOST_SIZES: Final = 256
"""Sizes that are asked for; what is beyond counts as unknown."""
_SECONDS: Final = 60.0


@dataclasses.dataclass(frozen=True)
class Refers:
    """What refers to keys.

    Attributes:
        pools: the prefix of each pool.
        others: prefixes that statuses and pods refer to.
        stores: master's address by pool, `ns/name`.
        members: pods that opted in.
        doubts: what could not be read, as sentences; with any of them nothing may be deleted.
    """

    pools: tuple[Reference, ...]
    others: tuple[Reference, ...]
    stores: dict[str, str]
    members: tuple[Member, ...]
    doubts: tuple[str, ...]


async def read_references(api: ClusterApi, home: str) -> Refers:
    """Read pools and members of all namespaces; of ``home`` alone, with a doubt, where the rest may not be read.

    Raises CannotReadError and NotInstalledError, as `kvshare check` does.
    """
    doubts: list[str] = []
    raw = await _everywhere(api, home, _POOLS, names.PLURAL, doubts, {})
    pools: list[Reference] = []
    others: list[Reference] = []
    stores: dict[str, str] = {}
    for pool in raw:
        metadata = pool.get("metadata") or {}
        name = f"{metadata.get('namespace')}/{metadata.get('name')}"
        try:
            seen = view(pool, "")
        except SpecError as error:
            doubts.append(f"pool {name} cannot be read: {error}")
            if stored := prefix_of(read_status(pool.get("status")).cache_namespace or ""):
                others.append(Reference(stored, f"status of pool {name}"))
            continue
        pools.append(Reference(seen.resolution.cache_namespace, f"pool {name}"))
        if seen.resolution.master_address:
            stores[name] = seen.resolution.master_address
    pods = await _everywhere(api, home, "/api/v1", "pods", doubts, {"labelSelector": names.MEMBER})
    members = tuple(member for pod in pods if (member := read_member(pod)) is not None)
    for member in members:
        said = [member.cache_namespace, member.record.cache_namespace if member.record else ""]
        if member.report is not None:
            said += [member.report.pool_prefix, member.report.namespace]
        found = {prefix_of(text) for text in said if text}
        others += [Reference(prefix, f"pod {member.namespace}/{member.name}") for prefix in sorted(found) if prefix]
    return Refers(tuple(pools), tuple(others), stores, members, tuple(doubts))


async def _everywhere(
    api: ClusterApi, home: str, base: str, plural: str, doubts: list[str], query: dict[str, str]
) -> list[Json]:
    try:
        return await list_all(api, f"{base}/{plural}", **query)
    except ApiError as error:
        if error.status == 404:
            raise NotInstalledError("the cluster does not know KVSharePool: helm install kvshare") from error
        if error.status != 403:
            raise CannotReadError(f"{plural} cannot be read: {error}") from error
        doubts.append(f"{plural} of all namespaces cannot be read: {error}")
    try:
        return await list_all(api, f"{base}/namespaces/{home}/{plural}", **query)
    except ApiError as error:
        raise CannotReadError(f"{plural} of namespace {home} cannot be read: {error}") from error


class Master:
    """The HTTP port of a store's master, at an address of its own or behind the API server."""

    def __init__(self, api: ClusterApi, url: str = "", path: str = "") -> None:
        self._api, self._url, self._path = api, url.rstrip("/"), path

    @property
    def where(self) -> str:
        """Where the keys come from, for people."""
        return self._url or self._path

    async def keys(self) -> list[str]:
        """Return all keys. Raises CannotReadError."""
        return [line for line in (await self._ask("/get_all_keys")).splitlines() if line]

    async def size(self, group: Group) -> int | None:
        """Return the bytes of a group, from one object of each size; None when one cannot be asked."""
        total = 0
        for suffix, key in list(group.samples.items())[:_MOST_SIZES]:
            try:
                replicas = json.loads(await self._ask(f"/query_key?key={key}"))["data"]
                total += group.counts[suffix] * sum(int(one["size_"]) for one in replicas)
            except (CannotReadError, ValueError, KeyError, TypeError):
                return None
        return total if len(group.samples) <= _MOST_SIZES else None

    async def _ask(self, path: str) -> str:
        try:
            if not self._url:
                return str((await self._api.call("GET", self._path + path, accept=TEXT))["text"])
            return await asyncio.to_thread(self._get, self._url + path)
        except (ApiError, OSError, ValueError) as error:
            raise CannotReadError(f"the master's HTTP port cannot be asked at {self.where}: {error}") from error

    @staticmethod
    def _get(url: str) -> str:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            return str(answer.read().decode(errors="replace"))


async def master_behind(api: ClusterApi, address: str, port: int = identity.METRICS_PORT) -> Master:
    """Find the pod behind a master's address, whose HTTP port is ``port``.

    Raises CannotReadError, naming the way that works without it.
    """
    found = _SERVICE.fullmatch(address)
    remedy = (
        f"make its HTTP port ({port}) reachable, for example by kubectl port-forward, and "
        "give --master-http http://127.0.0.1:PORT"
    )
    if found is None:
        raise CannotReadError(f"the store at {address} is not a Service of this cluster: {remedy}")
    base = f"/api/v1/namespaces/{found['namespace']}"
    try:
        service = await api.call("GET", f"{base}/services/{found['name']}")
        labels = (service.get("spec") or {}).get("selector") or {}
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in sorted(labels.items()))}
        pods = await list_all(api, f"{base}/pods", **query) if labels else []
    except ApiError as error:
        raise CannotReadError(f"the master's pod behind {address} cannot be found: {error}; {remedy}") from error
    running = sorted(
        str(pod["metadata"]["name"]) for pod in pods if (pod.get("status") or {}).get("phase") == "Running"
    )
    if not running:
        raise CannotReadError(f"no pod runs behind {address}: {remedy}")
    return Master(api, path=f"{base}/pods/{running[0]}:{port}/proxy")
