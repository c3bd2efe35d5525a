"""The controller process: kopf watches, our loop works.

Why this exists: the place where the controller's parts are put together, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any, Final

import kopf

from kvshare_operator.api import names
from kvshare_operator.edges.cluster_api import HttpClusterApi
from kvshare_operator.edges.gather import ClusterState, Gatherer
from kvshare_operator.edges.metrics import HealthSite
from kvshare_operator.edges.pool_index import wait_until_served
from kvshare_operator.edges.reconcile_loop import ReconcileLoop
from kvshare_operator.edges.secrets import certificate_keeper
from kvshare_operator.edges.store_keeper import StoreKeeper
from kvshare_operator.edges.webhook_process import configure
from kvshare_operator.settings import Settings

log = logging.getLogger("kvshare.controller")
_STUCK_SECONDS: Final = 300.0


def registry(settings: Settings) -> kopf.OperatorRegistry:
    """Return the handlers of the controller process."""
    handlers = kopf.get_default_registry()
    api = HttpClusterApi()
    state = ClusterState()
    gatherer = Gatherer(api, state, settings.connector_image, settings.watch_namespaces)
    keeper = certificate_keeper(api, settings)
    stores = StoreKeeper(api, settings.store) if settings.managed_store == "Enabled" else None
    loop = ReconcileLoop(gatherer, keeper, settings.full_pass_seconds, settings.sweep_seconds, stores)
    health = HealthSite(settings.health_port, alive=lambda: time.monotonic() - loop.beat < _STUCK_SECONDS)
    tasks: list[asyncio.Task[None]] = []

    operator_settings = settings

    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, operator_settings)
        settings.watching.label_selectors["", "v1", "pods"] = names.MEMBER
        settings.watching.chunk_size = 500
        await health.start()
        task = asyncio.create_task(loop.run(), name="reconcile loop")
        task.add_done_callback(_stopped)
        tasks.append(task)
        if operator_settings.watch_namespaces:
            await wait_until_served(api)

    def pool_event(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
        state.pool_event(type, body)

    def pod_event(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
        state.member_event(type, body)

    kopf.on.startup(registry=handlers)(start)
    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=handlers)(pool_event)
    kopf.on.event("", "v1", "pods", registry=handlers)(pod_event)
    return handlers


def _stopped(task: asyncio.Task[None]) -> None:
    """A loop that ends by itself is a fault: end the process, Kubernetes starts a fresh one."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("the reconcile loop failed", exc_info=task.exception())
        os._exit(1)
