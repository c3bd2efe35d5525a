"""What the operator counts, and the plain HTTP site that shows it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvshare_operator.api.status import Status

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
CONDITIONS: Final = Gauge(
    "kvshare_operator_pool_condition", "Whether a condition of a pool is True (1), or False or Unknown (0).",
    ["namespace", "pool", "condition"], registry=REGISTRY,
)  # fmt: skip
PROBLEMS: Final = Gauge(
    "kvshare_operator_problem_pods", "Pods with a problem in the pool's status, by reason.",
    ["namespace", "pool", "reason"], registry=REGISTRY,
)  # fmt: skip
RECONCILE_SECONDS: Final = Histogram(
    "kvshare_operator_reconcile_seconds", "Time of one look at a pool.", registry=REGISTRY
)
EVENTS: Final = Counter("kvshare_operator_events", "Kubernetes events, by result.", ["result"], registry=REGISTRY)
READY: Final = Gauge("kvshare_operator_webhook_ready", "1 while this webhook is ready for reviews.", registry=REGISTRY)
CERTIFICATE_EXPIRES: Final = Gauge(
    "kvshare_operator_certificate_expires_timestamp_seconds", "When the webhook's certificate ends.", registry=REGISTRY
)


def show_pool(namespace: str, pool: str, status: Status) -> None:
    """Show a pool's status; rows of what it no longer has are taken away."""
    for verdict, count in (status.members.model_dump() if status.members else {}).items():
        MEMBERS.labels(namespace, pool, verdict).set(count)
    for condition in status.conditions or []:
        CONDITIONS.labels(namespace, pool, condition.type).set(condition.status == "True")
    reasons = collections.Counter[str]()
    for problem in status.problems or []:
        reasons[problem.reason] += problem.pods
    _remove(PROBLEMS, (namespace, pool), keep=reasons.keys())
    for reason, pods in reasons.items():
        PROBLEMS.labels(namespace, pool, reason).set(pods)


def forget_pool(namespace: str, pool: str) -> None:
    """Take all rows of a pool that is gone away."""
    for gauge in (MEMBERS, CONDITIONS, PROBLEMS):
        _remove(gauge, (namespace, pool))


def _remove(gauge: Gauge, pool: tuple[str, str], keep: Collection[str] = ()) -> None:
    for family in gauge.collect():
        for sample in family.samples:
            labels = tuple(sample.labels.values())
            if labels[:2] == pool and labels[2] not in keep:
                gauge.remove(*labels)


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
