"""Which Services of a namespace have a name that hurts engines, asked one by one and remembered for a minute.

Why this exists: a warning needs to know them, and the permission to do so should be no larger than that: `get` on
these names, nothing listed. Not knowing is no trouble; a review never fails or waits for it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from kvshare_operator.core.injection.surroundings import COLLIDING_SERVICES
from kvshare_operator.edges.cluster_api import ApiError, ClusterApi

_FRESH_SECONDS: Final = 60.0
_PATIENCE_SECONDS: Final = 1.0
_MOST_NAMESPACES: Final = 1000


class ServiceNames:
    """Looks for the Services of ``COLLIDING_SERVICES``."""

    def __init__(self, api: ClusterApi) -> None:
        self.api = api
        self._known: dict[str, tuple[float, frozenset[str]]] = {}

    async def colliding(self, namespace: str) -> frozenset[str]:
        """Return those that exist in a namespace; what cannot be asked within a second counts as absent."""
        now = time.monotonic()
        kept = self._known.get(namespace)
        if kept is not None and now - kept[0] < _FRESH_SECONDS:
            return kept[1]
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                found = await self._ask(namespace)
        except TimeoutError:
            found = frozenset()
        if len(self._known) >= _MOST_NAMESPACES:
            self._known.clear()
        self._known[namespace] = (now, found)
        return found

    async def _ask(self, namespace: str) -> frozenset[str]:
        there = await asyncio.gather(*(self._exists(namespace, name) for name in COLLIDING_SERVICES))
        return frozenset(name for name, exists in zip(COLLIDING_SERVICES, there, strict=True) if exists)

    async def _exists(self, namespace: str, name: str) -> bool:
        try:
            await self.api.call("GET", f"/api/v1/namespaces/{namespace}/services/{name}")
        except ApiError:
            return False
        return True
