"""What the operator counts, and the plain HTTP site that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY: Final = CollectorRegistry()
REVIEWS: Final = Counter(
    "kvshare_operator_reviews", "Admission reviews, by decision and reason.", ["decision", "reason"], registry=REGISTRY
)
REVIEW_SECONDS: Final = Histogram("kvshare_operator_review_seconds", "Time of one review.", registry=REGISTRY)
REPORTS: Final = Counter("kvshare_operator_reports", "Member reports, by result.", ["result"], registry=REGISTRY)
RECONCILES: Final = Counter("kvshare_operator_reconciles", "Pools looked at, by result.", ["result"], registry=REGISTRY)
STATUS_WRITES: Final = Counter("kvshare_operator_status_writes", "Writes of a pool's status.", registry=REGISTRY)
STORE_WRITES: Final = Counter("kvshare_operator_store_writes", "Writes of managed stores' objects.", registry=REGISTRY)
MEMBERS: Final = Gauge(
    "kvshare_operator_members", "Members of a pool, by what they reported.", ["namespace", "pool", "verdict"],
    registry=REGISTRY,
)  # fmt: skip
CERTIFICATE_EXPIRES: Final = Gauge(
    "kvshare_operator_certificate_expires_timestamp_seconds", "When the webhook's certificate ends.", registry=REGISTRY
)


class HealthSite:
    """`/healthz` and `/metrics` over plain HTTP; healthy while ``alive`` says so."""

    def __init__(self, port: int, alive: Callable[[], bool], host: str | None = None) -> None:
        self.port, self.alive, self.host = port, alive, host
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Start to listen."""
        app = web.Application()
        app.add_routes([web.get("/healthz", self._health), web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.alive() else 503, text="ok\n" if self.alive() else "stuck\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})
