"""Where the operator is measured: a real kube-apiserver and Mooncake master, both processes as they are shipped.

Only the certificates take a short cut: the Secret is copied into the folder that a kubelet would mount.
"""

import base64
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import operator_processes
from kvshare_operator.api import crd
from testbed.cluster import Cluster, api_server
from testbed.mooncake import start_master
from testbed.ports import free_ports
from testbed.process import Process
from testbed.rest import api_client

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
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
        store: address of the Mooncake master that all pools name.
        processes: what runs now, by name.
    """

    api: Cluster
    client: httpx.Client
    folder: Path
    store: str
    admission: int
    health: dict[str, int]
    report: int
    processes: dict[str, Process] = field(default_factory=dict)

    def start(self, name: str) -> Process:
        """Start `controller` or `webhook`."""
        environment = operator_processes.operator_environment(
            self.api.kubeconfig,
            self.health[name],
            namespace="default",
            service="localhost",
            certificate_directory=self.certificates,
            admission_port=self.admission,
            report_port=self.report,
            full_pass_seconds=60,
        )
        command = [sys.executable, "-m", "kvshare_operator", name]
        self.processes[name] = Process(name, command, log=self.folder / f"{name}.log", environment=environment)
        return self.processes[name]

    def mount_certificates(self) -> None:
        """Copy the Secret to where the webhook looks, as a kubelet does."""
        self.until(lambda: bool(self.api.kubectl.list("secrets")), "certificates are issued")
        self.certificates.mkdir(exist_ok=True)
        operator_processes.mount_certificates(self.api.kubectl, operator_processes.SECRET, self.certificates)

    def webhook_ready(self) -> bool:
        """Whether the webhook says that it can answer."""
        return operator_processes.ask(self.certificates, "/readyz", self.admission)[0] == 200

    def metric(self, name: str, process: str = "controller") -> float:
        """The sum of a metric's samples as a process exports it."""
        return operator_processes.metric(self.health[process], name)

    @property
    def certificates(self) -> Path:
        """Where the webhook finds its certificates."""
        return self.folder / "certificates"

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
    authority = base64.b64encode((place.certificates / "ca.crt").read_bytes()).decode()
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
        health = {"controller": controller, "webhook": webhook}
        master = start_master(folder)
        place = Place(api, client, folder, master.address, admission, health, report)
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
            for process in (*place.processes.values(), master.process):
                process.stop()
