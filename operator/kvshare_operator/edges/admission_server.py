"""The TLS listeners of the webhook process: reviews on one port, member reports on the other.

Why this exists: kopf's own server fails closed on exceptions and drops connections while certificates
rotate. This one sits in kopf's `settings.admission.server`, so kopf keeps process, login and watches. The
listeners are never restarted: a new pair of certificate and key is validated on a context of its own, then
loaded into the one in use. On stop it reports "not ready" and goes on answering until the endpoints noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import pathlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from kvshare_operator.core import certificates, review
from kvshare_operator.edges import metrics

log = logging.getLogger("kvshare.admission")
MAX_REVIEW_BYTES: Final = 8 * 2**20
"""The API server takes requests of 3 MiB; as JSON, what was sent as protobuf can be larger."""
_REVIEW_SECONDS: Final = 4.0
"""Below the configuration's timeout of 5 s, so that our own answer arrives."""
_CERTIFICATE_CHECK_SECONDS: Final = 1.0

Json = dict[str, Any]
Reviewer = Callable[[Json], Awaitable[review.Answer]]


class KeyPair:
    """Certificate and key as mounted files, and the context that serves them."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.certificate = directory / "tls.crt"
        self.key = directory / "tls.key"
        self.context: ssl.SSLContext | None = None
        self._digest = b""

    def refresh(self) -> bool:
        """Load the files if they changed; return True if they were loaded.

        A pair that does not fit, or half a write, raises OSError or ssl.SSLError and leaves what is served.
        """
        digest = hashlib.sha256(self.certificate.read_bytes() + self.key.read_bytes()).digest()
        if digest == self._digest:
            return False
        trial = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        trial.load_cert_chain(self.certificate, self.key)
        if self.context is None:
            self.context = trial
        else:
            self.context.load_cert_chain(self.certificate, self.key)
        self._digest = digest
        self._tell_end()
        return True

    def _tell_end(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            metrics.CERTIFICATE_EXPIRES.set(certificates.expires(self.certificate.read_text()).timestamp())


class AdmissionServer:
    """kopf's server protocol: an async generator that serves for as long as it is iterated.

    Args:
        reviewer: answers one admission request; may raise or hang.
        report_app: application of the report endpoint, or None.
        ready: awaited until it returns True before the server calls itself ready.
        directory: where `tls.crt` and `tls.key` are mounted.
        ports: (reviews, reports).
        drain_seconds: how long to go on answering after stop.
    """

    def __init__(
        self,
        reviewer: Reviewer,
        report_app: web.Application | None,
        ready: Callable[[], Awaitable[bool]],
        directory: pathlib.Path,
        ports: tuple[int, int],
        drain_seconds: float,
        host: str | None = None,
    ) -> None:
        self.reviewer, self.report_app, self.ready = reviewer, report_app, ready
        self.pair = KeyPair(directory)
        self.ports, self.drain_seconds, self.host = ports, drain_seconds, host
        self.is_ready = False
        self.draining = False

    async def __call__(self, _webhook: object) -> AsyncIterator[Json]:
        """Serve. The one yielded value tells kopf nothing: the configuration belongs to the chart."""
        await self._first_pair()
        runners = [await self._listen(self._review_app(), self.ports[0])]
        if self.report_app is not None:
            runners.append(await self._listen(self.report_app, self.ports[1]))
        log.info("serving reviews on port %d and reports on port %d", *self.ports)
        try:
            yield {}
            while True:
                if not self.is_ready:
                    await self._become_ready()
                await asyncio.sleep(_CERTIFICATE_CHECK_SECONDS)
                self._renew()
        finally:
            self.draining = True
            metrics.READY.set(0)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(self.drain_seconds)
            for runner in runners:
                await runner.cleanup()

    async def _first_pair(self) -> None:
        told = False
        while True:
            try:
                self.pair.refresh()
                return
            except (OSError, ssl.SSLError) as error:
                if not told:
                    log.warning("waiting for a certificate in %s: %s", self.pair.certificate.parent, error)
                told = True
                await asyncio.sleep(0.5)

    async def _become_ready(self) -> None:
        try:
            self.is_ready = await self.ready()
            metrics.READY.set(self.is_ready)
        except Exception as error:
            log.warning("not ready: %s", error)

    def _renew(self) -> None:
        try:
            if self.pair.refresh():
                log.info("a new certificate is served")
        except (OSError, ssl.SSLError) as error:
            log.error("the old certificate is kept: %s", error)

    async def _listen(self, app: web.Application, port: int) -> web.AppRunner:
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=8)
        await runner.setup()
        await web.TCPSite(runner, self.host, port, ssl_context=self.pair.context, backlog=512).start()
        return runner

    def _review_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REVIEW_BYTES)
        app.add_routes([web.post("/inject", self._inject), web.get("/readyz", self._readyz)])
        return app

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.draining:
            return web.Response(status=503, text="draining\n")
        return web.Response(status=200 if self.is_ready else 503, text="ok\n" if self.is_ready else "no pools yet\n")

    async def _inject(self, request: web.Request) -> web.Response:
        began = time.monotonic()
        try:
            body = await request.json()
            asked = body["request"]
            uid = str(asked["uid"])
        except web.HTTPException:
            raise
        except Exception:
            return web.Response(status=400, text="an AdmissionReview v1 with a request is expected\n")
        try:
            async with asyncio.timeout(_REVIEW_SECONDS):
                answer = await self.reviewer(asked)
        except Exception as error:  # a fault of ours must never cost a pod
            log.exception("review %s failed", uid)
            answer = review.failed(type(error).__name__)
        metrics.REVIEWS.labels(answer.decision, answer.reason).inc()
        metrics.REVIEW_SECONDS.observe(time.monotonic() - began)
        return web.json_response(
            {
                "apiVersion": "admission.k8s.io/v1",
                "kind": "AdmissionReview",
                "response": {"uid": uid, **answer.response},
            }
        )
