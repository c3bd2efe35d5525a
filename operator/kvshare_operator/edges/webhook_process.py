"""The webhook process: kopf holds process and watches, our server answers.

Why this exists: the place where the webhook's parts are put together, and nothing else.
"""

from __future__ import annotations

import asyncio
import pathlib
import time
from typing import Any

import kopf

from kvshare_operator.api import names
from kvshare_operator.core import review
from kvshare_operator.core.injection.settings import InjectionSettings
from kvshare_operator.core.server_version import read_version
from kvshare_operator.edges.admission_server import AdmissionServer
from kvshare_operator.edges.cluster_api import ApiError, HttpClusterApi
from kvshare_operator.edges.metrics import HealthSite
from kvshare_operator.edges.pool_index import PoolDirectory, stored, wait_until_served
from kvshare_operator.edges.reports import ReportEndpoint
from kvshare_operator.edges.service_names import ServiceNames
from kvshare_operator.settings import Settings

Json = dict[str, Any]
_VERSION_SECONDS = 600.0
_RETRY_SECONDS = 5.0


class FaultSwitchError(RuntimeError):
    """A fault that was asked for: it must do no more harm than one that was not."""


def registry(settings: Settings) -> kopf.OperatorRegistry:
    """Return the handlers of the webhook process."""
    handlers = kopf.get_default_registry()
    api = HttpClusterApi()
    health = HealthSite(settings.health_port, alive=lambda: True)

    def pools(namespace: str, name: str, body: kopf.Body, **_: Any) -> Any:
        return {(namespace, name): stored(body)}

    async def start(settings: kopf.OperatorSettings, pools: Any, **_: Any) -> None:
        configure(settings, operator_settings)
        settings.admission.server = server(operator_settings, api, pools)
        await health.start()
        if operator_settings.watch_namespaces:
            await wait_until_served(api)

    operator_settings = settings
    kopf.index(names.GROUP, names.VERSION, names.PLURAL, id="pools", registry=handlers)(pools)
    kopf.on.startup(registry=handlers)(start)
    return handlers


def configure(settings: kopf.OperatorSettings, ours: Settings) -> None:
    """Set what both processes need of kopf: no events from logs, watches that notice silence.

    In some namespaces only, nothing of the whole cluster is read: no namespaces, and no resources that come later.
    """
    settings.scanning.disabled = bool(ours.watch_namespaces)
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = ours.watch_silence_seconds
    settings.networking.request_timeout = 30


def server(settings: Settings, api: HttpClusterApi, index: Any) -> AdmissionServer:
    """Return the server with everything behind it."""
    directory = pathlib.Path(settings.certificate_directory)
    found = PoolDirectory(api, index, settings.watch_namespaces)
    facts = InstallationFacts(settings, api, directory)
    services = ServiceNames(api)

    async def reviewer(request: Json) -> review.Answer:
        asked = review.question(request)
        if asked is None:
            return review.ignore()
        if settings.watch_namespaces and asked.namespace not in settings.watch_namespaces:
            return review.ignore()
        if settings.fault == "Review":
            raise FaultSwitchError("KVSHARE_FAULT=Review is set")
        pool = await found.find(asked.namespace, asked.pool)
        around = await services.colliding(asked.namespace)
        return await asyncio.to_thread(review.answer, request, pool, await facts.injection(), around)

    return AdmissionServer(
        reviewer=reviewer,
        report_app=ReportEndpoint(api).app(),
        ready=found.listed,
        directory=directory,
        ports=(settings.admission_port, settings.report_port),
        drain_seconds=settings.drain_seconds,
    )


class InstallationFacts:
    """What every injection needs of the installation: the mounted CA and the cluster's version."""

    def __init__(self, settings: Settings, api: HttpClusterApi, directory: pathlib.Path) -> None:
        self.settings, self.api, self.directory = settings, api, directory
        self._version: tuple[int, int] | None = None
        self._asked_at = -_VERSION_SECONDS

    async def injection(self) -> InjectionSettings:
        """Return the settings of an injection as they are now. Without a CA nothing is said about reports."""
        try:
            authority = (self.directory / "ca.crt").read_text()
        except OSError:
            authority = ""
        age = time.monotonic() - self._asked_at
        if age >= (_VERSION_SECONDS if self._version else _RETRY_SECONDS):
            self._asked_at = time.monotonic()
            self._version = await self._server_version()
        return InjectionSettings(
            connector_image=self.settings.connector_image,
            image_pull_policy=self.settings.connector_pull_policy,
            image_pull_secrets=self.settings.connector_pull_secrets,
            report_url=self.settings.report_url if authority else "",
            report_ca=authority,
            server_version=self._version,
            known_images=self.settings.known_images,
        )

    async def _server_version(self) -> tuple[int, int] | None:
        try:
            return read_version(await self.api.call("GET", "/version"))
        except ApiError:
            return None
