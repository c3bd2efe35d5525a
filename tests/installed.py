"""An installation of the chart on a bare API server: its own objects, and its processes under its own service accounts.

No kubelet runs here, so three things are done by hand: processes are started on this machine with the variables of
their rendered containers, the webhook configuration leads to this machine, and certificates are copied to where they
would be mounted. Permissions are those that the chart grants, and nothing else.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator

import operator_processes
from helm_chart import NAMESPACE, ROOT, environment_of, without_hooks
from operator_processes import ask, mount_certificates
from pods import Json
from testbed.certificates import write_kubeconfig
from testbed.cluster import Cluster, api_server
from testbed.ports import free_ports


def until(true: Callable[[], bool], what: str, seconds: float = 90) -> None:
    """Wait until something is true; longer than without a chart, whose processes start with rendered settings."""
    operator_processes.until(true, what, seconds)


def make_namespace(api: Cluster, name: str) -> None:
    """A namespace with the service account that a controller manager would make."""
    api.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    api.kubectl.within(name).apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}})


class Installation:
    """The chart's objects on an API server, and its processes beside it."""

    def __init__(self, api: Cluster, folder: pathlib.Path, objects: list[Json]) -> None:
        self.api, self.kubectl, self.folder = api, api.kubectl, folder
        self.objects = copy.deepcopy(without_hooks(objects))
        self.admission, self.report, *health = free_ports(4)
        self.health = dict(zip(("controller", "webhook"), health, strict=True))
        self.certificates = folder / "certificates"
        self.certificates.mkdir()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def apply(self) -> None:
        """Apply every object; the webhook configuration leads to this machine."""
        for thing in self.objects:
            if thing["kind"] == "MutatingWebhookConfiguration":
                client = thing["webhooks"][0]["clientConfig"]
                del client["service"]
                client["url"] = f"https://localhost:{self.admission}/inject"
            self.kubectl.within(thing["metadata"].get("namespace", "default")).apply(thing)

    def environment(self, account: str) -> dict[str, str]:
        """Variables of a process that is a service account of the chart."""
        kubeconfig = self.folder / f"{account}.kubeconfig"
        token = self.kubectl.within(NAMESPACE).run("create", "token", account, "--duration=1h").strip()
        config = json.loads(self.api.kubeconfig.read_text())["clusters"][0]["cluster"]
        authority = self.folder / "api.crt"
        authority.write_bytes(base64.b64decode(config["certificate-authority-data"]))
        write_kubeconfig(kubeconfig, server=config["server"], token=token, authority=authority)
        packages = f"{ROOT / 'operator'}:{ROOT / 'connector'}"
        return {**os.environ, "PYTHONPATH": packages, "KUBECONFIG": str(kubeconfig)}

    def start(self, process: str) -> None:
        """Start a process as its service account."""
        environment = {
            **self.environment(f"kvshare-{process}"),
            **environment_of(self.objects, process),
            "KVSHARE_SERVICE": "localhost",
            "KVSHARE_CERTIFICATE_DIRECTORY": str(self.certificates),
            "KVSHARE_ADMISSION_PORT": str(self.admission),
            "KVSHARE_REPORT_PORT": str(self.report),
            "KVSHARE_HEALTH_PORT": str(self.health[process]),
            "KVSHARE_DRAIN_SECONDS": "1",
        }
        with (self.folder / f"{process}.log").open("ab") as log:
            self._processes[process] = subprocess.Popen(
                [sys.executable, "-m", "kvshare_operator", process], env=environment, stderr=log, stdout=log
            )

    def stop(self) -> None:
        """Stop all processes as a kubelet does."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        try:
            for process in self._processes.values():
                process.wait(timeout=30)
        finally:
            for process in self._processes.values():
                process.kill()
            self._processes.clear()

    def log(self, process: str) -> str:
        """What a process wrote."""
        return (self.folder / f"{process}.log").read_text()

    def mount_secret(self, name: str) -> None:
        """Copy what the webhook would have mounted of a Secret."""
        mount_certificates(self.kubectl.within(NAMESPACE), name, self.certificates)

    def wait_until_ready(self) -> None:
        """Wait for the webhook."""
        until(lambda: self.ask("/readyz", self.admission)[0] == 200, "the webhook is ready")

    def ask(self, path: str, port: int, body: bytes | None = None, token: str = "") -> tuple[int, str]:
        """Call the webhook process over TLS; return status and text, 0 when it cannot be trusted or reached."""
        return ask(self.certificates, path, port, body, token)

    def metric(self, process: str, name: str) -> float:
        """The value of a metric without labels."""
        with urllib.request.urlopen(f"http://localhost:{self.health[process]}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@contextlib.contextmanager
def bare_api(*namespaces: str) -> Iterator[tuple[Cluster, pathlib.Path]]:
    """An API server with these namespaces and the release's own, and a folder."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as api,
    ):
        for name in (NAMESPACE, *namespaces):
            make_namespace(api, name)
        yield api, pathlib.Path(folder)


@contextlib.contextmanager
def installation(api: Cluster, folder: pathlib.Path, objects: list[Json]) -> Iterator[Installation]:
    """The chart's objects are applied; processes that are started end with the block."""
    place = Installation(api, folder, objects)
    place.apply()
    try:
        yield place
    finally:
        place.stop()
