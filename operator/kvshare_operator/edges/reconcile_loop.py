"""The controller's one loop: a dirty set, a full pass, gather, decide, apply.

Why this exists: kopf's own change handlers write annotations and finalizers, and two processes would fight
over them. Here events only mark pools; one task works them off. It keeps nothing that the cluster does not
hold, so it can be killed at any moment. It has no rule of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from kvshare_operator.api.status import Status
from kvshare_operator.core.pool.status import Reach, next_status
from kvshare_operator.edges import metrics
from kvshare_operator.edges.apply import apply_status, tell_pod, tell_unwritable
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.gather import Gatherer, Key
from kvshare_operator.edges.secrets import CertificateKeeper
from kvshare_operator.edges.store_keeper import StoreKeeper

log = logging.getLogger("kvshare.loop")
_GATHER_BURST_SECONDS: Final = 0.2
_RETRY_SECONDS: Final = 5.0
_CERTIFICATE_SECONDS: Final = 60.0

Json = dict[str, Any]


class ReconcileLoop:
    """Runs until it is cancelled.

    Attributes:
        beat: monotonic time of the last turn; a liveness probe looks at it.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        keeper: CertificateKeeper | None,
        full_pass_seconds: float,
        sweep_seconds: float,
        stores: StoreKeeper | None = None,
    ) -> None:
        self.gatherer, self.keeper, self.stores = gatherer, keeper, stores
        self.state = gatherer.state
        self.beat = time.monotonic()
        self._unwritable: dict[str, Any] = {}
        self._every: list[_Repeated] = [
            _Repeated("full pass", full_pass_seconds, gatherer.list_pools),
            _Repeated("sweep", sweep_seconds, self._sweep),
        ]
        if keeper is not None:
            self._every.insert(0, _Repeated("certificates", _CERTIFICATE_SECONDS, keeper.keep))

    async def run(self) -> None:
        """Work until cancelled."""
        await self._seed()
        while True:
            await self.turn()
            wait = max(0.0, min(one.due for one in self._every) - time.monotonic())
            try:
                # `asyncio.wait_for` loses a cancellation that comes with the event (Python 3.11), and we would go on.
                async with asyncio.timeout(min(wait, _RETRY_SECONDS)):
                    await self.state.changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_GATHER_BURST_SECONDS)

    async def turn(self) -> None:
        """Do what is due, then look at every dirty pool once."""
        self.beat = time.monotonic()
        for one in self._every:
            await one.run_when_due()
        self.state.changed.clear()
        dirty, self.state.dirty = self.state.dirty, set()
        reached = await self.gatherer.look_at_stores(dirty)
        for key in sorted(dirty):
            self.beat = time.monotonic()
            await self._reconcile(key, reached)

    async def _seed(self) -> None:
        """Know all members before the first status is written."""
        while True:
            try:
                await self.gatherer.list_members()
                return
            except ApiError as error:
                log.warning("members could not be listed, trying again: %s", error)
            except Exception:
                metrics.RECONCILES.labels("fault").inc()
                log.exception("members could not be listed, trying again")
            self.beat = time.monotonic()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _sweep(self) -> None:
        for member in await self.gatherer.sweep():
            await tell_pod(self.gatherer.api, member)

    async def _reconcile(self, key: Key, reached: Mapping[str, Reach]) -> None:
        try:
            with metrics.RECONCILE_SECONDS.time():
                result = await self._one(key, reached)
        except ApiError as error:
            result = "retry" if error.retry else "refused"
            log.warning("pool %s/%s: %s", *key, error)
            if error.retry:
                self._later(key)
        except Exception:
            result = "fault"
            log.exception("pool %s/%s could not be looked at", *key)
        metrics.RECONCILES.labels(result).inc()

    async def _one(self, key: Key, reached: Mapping[str, Reach]) -> str:
        pool = self.state.pools.get(key)
        if pool is None:
            self.gatherer.view(key)  # forgets it
            metrics.forget_pool(*key)
            return "gone"
        reach, store = Reach(None), None
        if (seen := self.gatherer.view(key)) is not None:
            reach = reached.get(seen.resolution.master_address or "", reach)
            if self.stores is not None and seen.spec.store.type == "Managed":
                store = await self.stores.keep(pool, seen.spec)
        gathered = self.gatherer.gather(key, reach)
        if gathered is None:
            return "gone"
        gathered = dataclasses.replace(gathered, store=store)
        status = next_status(gathered)
        metrics.show_pool(*key, status)
        written = await self._write(pool, status)
        settling = store is not None and not store.complete and self.stores is not None and self.stores.settling(pool)
        if settling or (gathered.reach.reached is False and (store is None or store.complete)):
            self._later(key)
        return "written" if written else "unchanged"

    async def _write(self, pool: Json, status: Status) -> bool:
        """Write a status; one that the API server will never take is told by an event, and not tried again.

        Until the pool is edited: its UID and generation are remembered.
        """
        metadata = pool["metadata"]
        version = (str(metadata.get("uid")), metadata.get("generation"))
        if self._unwritable.get(version[0]) == version[1]:
            return False
        try:
            return await apply_status(self.gatherer.api, pool, status)
        except ApiError as error:
            if not error.retry and error.status not in (0, 403, 404):
                self._unwritable[version[0]] = version[1]
                await tell_unwritable(self.gatherer.api, pool, status, str(error))
            raise

    def _later(self, key: Key) -> None:
        asyncio.get_running_loop().call_later(_RETRY_SECONDS, self.state.mark, key)


class _Repeated:
    """Something that is done every so often; a failure is tried again soon."""

    def __init__(self, name: str, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        self.name, self.seconds, self.action = name, seconds, action
        self.due = 0.0

    async def run_when_due(self) -> None:
        if time.monotonic() < self.due:
            return
        try:
            await self.action()
            self.due = time.monotonic() + self.seconds
            return
        except ApiError as error:
            log.warning("%s failed, trying again: %s", self.name, error)
        except Exception:  # an object that nobody has thought of must not end the loop for all pools
            metrics.RECONCILES.labels("fault").inc()
            log.exception("%s failed, trying again", self.name)
        self.due = time.monotonic() + min(self.seconds, _RETRY_SECONDS)
