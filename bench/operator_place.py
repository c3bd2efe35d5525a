"""Where the operator is measured: a real kube-apiserver, both processes as they are shipped, a client that keeps up.

Only the certificates take a short cut: the Secret is copied into the folder that a kubelet would mount.
"""

import base64
import os
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvshare_operator.api import crd
from testbed.cluster import Cluster, api_server
from testbed.ports import free_ports
from testbed.process import Process
from testbed.rest import api_client

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
SECRET = "/api/v1/namespaces/default/secrets/kvshare-webhook-certificates"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
POOLS = "/apis/kvshare.dev/v1alpha1/namespaces/default/kvsharepools"
PODS = "/api/v1/namespaces/default/pods"


@dataclass
class Place:
    """An API server with both processes beside it.

    Attributes:
        api: the API server.
        client: its client, one kept connection.
        folder: logs and certificates.
        processes: what runs now, by name.
    """

    api: Cluster
    client: httpx.Client
    folder: Path
    admission: int
    health: dict[str, int]
    report: int
    processes: dict[str, Process] = field(default_factory=dict)

    def start(self, name: str) -> Process:
        """Start `controller` or `webhook`."""
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'connector'}",
            "KUBECONFIG": str(self.api.kubeconfig),
            "KVSHARE_NAMESPACE": "default",
            "KVSHARE_SERVICE": "localhost",
            "KVSHARE_CONNECTOR_IMAGE": "example.org/connector:1",
            "KVSHARE_CERTIFICATE_DIRECTORY": str(self.folder / "certificates"),
            "KVSHARE_ADMISSION_PORT": str(self.admission),
            "KVSHARE_REPORT_PORT": str(self.report),
            "KVSHARE_HEALTH_PORT": str(self.health[name]),
        }
        command = [sys.executable, "-m", "kvshare_operator", name]
        self.processes[name] = Process(name, command, log=self.folder / f"{name}.log", environment=environment)
        return self.processes[name]

    def mount_certificates(self) -> None:
        """Copy the Secret to where the webhook looks, as a kubelet does."""
        self.until(lambda: self.client.get(SECRET).status_code == 200, "certificates are issued")
        target = self.folder / "certificates"
        target.mkdir(exist_ok=True)
        for key, value in self.client.get(SECRET).json()["data"].items():
            (target / key).write_bytes(base64.b64decode(value))

    def webhook_ready(self) -> bool:
        """Whether the webhook says that it can answer."""
        trust = ssl.create_default_context(cafile=str(self.folder / "certificates" / "ca.crt"))
        try:
            with urllib.request.urlopen(
                f"https://localhost:{self.admission}/readyz", context=trust, timeout=5
            ) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metric(self, name: str, process: str = "controller") -> float:
        """The sum of a metric's samples as a process exports it."""
        with urllib.request.urlopen(f"http://localhost:{self.health[process]}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        rows = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in rows)

    def rest(self, method: str, path: str, body: Json | None = None) -> Json:
        """Ask the API server.

        Raises:
            RuntimeError: it did not do what was asked.
        """
        answer = self.client.request(method, path, json=body)
        if answer.status_code >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        found: Json = answer.json()
        return found

    def until(self, true: Callable[[], bool], what: str, seconds: float = 60) -> float:
        """Wait, and return how long it took, in seconds.

        Raises:
            TimeoutError: it did not come true in time.
        """
        began = time.monotonic()
        while not true():
            for process in self.processes.values():
                process.check()
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not within {seconds:g} s: {what}; logs are in {self.folder}")
            time.sleep(0.1)
        return time.monotonic() - began


def used(process: Process) -> tuple[float, float]:
    """Processor seconds and resident memory, MB, of a process so far."""
    fields = Path(f"/proc/{process.popen.pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int(Path(f"/proc/{process.popen.pid}/statm").read_text().split()[1])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def webhook_configuration(place: Place) -> Json:
    """The chart's configuration, pointing at this machine."""
    authority = base64.b64encode((place.folder / "certificates" / "ca.crt").read_bytes()).decode()
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "kvshare"},
        "webhooks": [
            {
                "name": "inject.kvshare.dev",
                "admissionReviewVersions": ["v1"],
                "clientConfig": {"url": f"https://localhost:{place.admission}/inject", "caBundle": authority},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
                "failurePolicy": "Fail",
                "sideEffects": "None",
            }
        ],
    }


@contextmanager
def serve(folder: Path) -> Iterator[Place]:
    """A place where the resource is installed and both processes serve; the webhook is not registered yet."""
    with api_server(folder / "s") as api, api_client(api.kubeconfig) as client:
        admission, report, controller, webhook = free_ports(4)
        place = Place(api, client, folder, admission, {"controller": controller, "webhook": webhook}, report)
        try:
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            api.kubectl.apply(account, crd.manifest())
            api.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
            place.start("controller")
            place.mount_certificates()
            place.start("webhook")
            place.until(place.webhook_ready, "the webhook is ready")
            yield place
        finally:
            for process in place.processes.values():
                process.stop()
