"""The settings of both processes: environment variables to one frozen object.

Why this exists: raw input is read once, here, and every mistake in it is named at once. Defaults stand beside
their explanation. The chart sets these variables; nothing else reads the environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvshare_operator.core.injection.settings import KNOWN_IMAGES
from kvshare_operator.core.store.settings import StoreSettings


class SettingsError(ValueError):
    """Environment variables that cannot be used; the message names all of them."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of webhook and controller.

    Attributes:
        namespace: namespace of the operator itself (KVSHARE_NAMESPACE).
        service: name of the webhook's Service (KVSHARE_SERVICE): certificates and the report URL carry it.
        watch_namespaces: namespaces to work in; empty means all (KVSHARE_WATCH_NAMESPACES, comma-separated).
        webhook_configuration: MutatingWebhookConfiguration whose caBundle is kept (KVSHARE_WEBHOOK_CONFIGURATION).
        certificate_secret: Secret with the certificates (KVSHARE_CERTIFICATE_SECRET).
        certificate_mode: SelfManaged (issued and renewed here), CertManager or Secret (somebody else's: nothing is
            read or written) (KVSHARE_CERTIFICATE_MODE).
        certificate_directory: where the webhook finds the mounted Secret (KVSHARE_CERTIFICATE_DIRECTORY).
        connector_image: payload image where a pool names none (KVSHARE_CONNECTOR_IMAGE).
        connector_pull_policy: its pull policy (KVSHARE_CONNECTOR_PULL_POLICY).
        connector_pull_secrets: its pull secrets (KVSHARE_CONNECTOR_PULL_SECRETS).
        known_images: regular expressions of images whose ENTRYPOINT runs vLLM, one a line (KVSHARE_KNOWN_IMAGES).
        managed_store: Enabled or Disabled: whether stores are run for pools (KVSHARE_MANAGED_STORE).
        store_image: image with Mooncake's programs where a pool names none (KVSHARE_STORE_IMAGE).
        store_pull_policy: its pull policy (KVSHARE_STORE_PULL_POLICY).
        store_pull_secrets: its pull secrets, in the pools' namespaces (KVSHARE_STORE_PULL_SECRETS).
        store_run_as_user: user id of the store's pods; 0 leaves it to image or platform (KVSHARE_STORE_RUN_AS_USER).
        report_port: port of the report endpoint in the Service's URL (KVSHARE_REPORT_PORT).
        admission_port: port that the webhook listens on (KVSHARE_ADMISSION_PORT).
        health_port: plain HTTP with /healthz and /metrics (KVSHARE_HEALTH_PORT).
        full_pass_seconds: how often every pool is looked at without an event (KVSHARE_FULL_PASS_SECONDS).
        sweep_seconds: how often pods without a record are looked for (KVSHARE_SWEEP_SECONDS).
        watch_silence_seconds: after how long without any event a watch counts as dead and is opened anew; the API
            server sends something every minute (KVSHARE_WATCH_SILENCE_SECONDS).
        drain_seconds: how long a stopping webhook goes on answering (KVSHARE_DRAIN_SECONDS).
        log_level: DEBUG, INFO, WARNING or ERROR (KVSHARE_LOG_LEVEL).
        fault: for trials only: Review makes every review fail inside the webhook (KVSHARE_FAULT).
    """

    namespace: str = "kvshare-system"
    service: str = "kvshare-webhook"
    watch_namespaces: tuple[str, ...] = ()
    webhook_configuration: str = "kvshare"
    certificate_secret: str = "kvshare-webhook-certificates"
    certificate_mode: str = "SelfManaged"
    certificate_directory: str = "/etc/kvshare/certificates"
    connector_image: str = ""
    connector_pull_policy: str = ""
    connector_pull_secrets: tuple[str, ...] = ()
    known_images: tuple[str, ...] = KNOWN_IMAGES
    managed_store: str = "Enabled"
    store_image: str = ""
    store_pull_policy: str = ""
    store_pull_secrets: tuple[str, ...] = ()
    store_run_as_user: int = 65532
    report_port: int = 9444
    admission_port: int = 9443
    health_port: int = 8080
    full_pass_seconds: int = 60
    sweep_seconds: int = 300
    watch_silence_seconds: int = 70
    drain_seconds: int = 5
    log_level: str = "INFO"
    fault: str = ""

    @property
    def report_url(self) -> str:
        """Where members report."""
        return f"https://{self.service}.{self.namespace}.svc:{self.report_port}/v1/report"

    @property
    def store(self) -> StoreSettings:
        """What managed stores are built with."""
        return StoreSettings(
            operator_namespace=self.namespace,
            image=self.store_image,
            pull_policy=self.store_pull_policy,
            pull_secrets=self.store_pull_secrets,
            run_as_user=self.store_run_as_user,
        )

    @property
    def dns_names(self) -> tuple[str, ...]:
        """The names that the webhook's certificate is for."""
        host = f"{self.service}.{self.namespace}.svc"
        return host, f"{host}.cluster.local", f"{self.service}.{self.namespace}", self.service


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", ",").split(",") if part.strip())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip()) or KNOWN_IMAGES


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("a whole number of at least 1 expected")
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdigit():
        raise ValueError("a whole number of at least 0 expected")
    return int(text)


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)} expected")
        return text

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "namespace": str,
    "service": str,
    "watch_namespaces": _list,
    "webhook_configuration": str,
    "certificate_secret": str,
    "certificate_mode": _one_of("SelfManaged", "CertManager", "Secret"),
    "certificate_directory": str,
    "connector_image": str,
    "connector_pull_policy": _one_of("", "Always", "IfNotPresent", "Never"),
    "connector_pull_secrets": _list,
    "known_images": _lines,
    "managed_store": _one_of("Enabled", "Disabled"),
    "store_image": str,
    "store_pull_policy": _one_of("", "Always", "IfNotPresent", "Never"),
    "store_pull_secrets": _list,
    "store_run_as_user": _not_negative,
    "report_port": _positive,
    "admission_port": _positive,
    "health_port": _positive,
    "full_pass_seconds": _positive,
    "sweep_seconds": _positive,
    "watch_silence_seconds": _positive,
    "drain_seconds": _positive,
    "log_level": _one_of("DEBUG", "INFO", "WARNING", "ERROR"),
    "fault": _one_of("", "Review"),
}


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read `KVSHARE_*` variables. Raises SettingsError that names every variable that cannot be used."""
    values: dict[str, Any] = {}
    mistakes = []
    for field, reader in _READERS.items():
        variable = f"KVSHARE_{field.upper()}"
        if variable not in environment:
            continue
        try:
            values[field] = reader(environment[variable])
        except ValueError as error:
            mistakes.append(f"{variable}={environment[variable]!r} given, {error}")
    if mistakes:
        raise SettingsError("; ".join(mistakes))
    return Settings(**values)
