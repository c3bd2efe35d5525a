"""Controller and webhook as processes beside a bare API server: variables, certificates, calls, metrics, waiting.

Shared by tests that start them; each says itself what it starts and with which permissions.
"""

from __future__ import annotations

import base64
import os
import pathlib
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence

from testbed.kubectl import Kubectl
from testbed.ports import free_ports

ROOT = pathlib.Path(__file__).parents[1]
SECRET = "kvshare-webhook-certificates"
WRITING = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE"})
_COUNTED = re.compile(r"^apiserver_request_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_NO_STATE = frozenset({"leases", "tokenreviews", "subjectaccessreviews"})


def operator_environment(kubeconfig: pathlib.Path, health_port: int, **settings: object) -> dict[str, str]:
    """The variables of one process; ``settings`` are named as in ``kvshare_operator.settings``."""
    variables = {f"KVSHARE_{name.upper()}": str(value) for name, value in settings.items()}
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'connector'}",
        "KUBECONFIG": str(kubeconfig),
        "KVSHARE_CONNECTOR_IMAGE": "example.org/connector:1",
        "KVSHARE_FULL_PASS_SECONDS": "1",
        "KVSHARE_HEALTH_PORT": str(health_port),
        **variables,
    }


class OperatorProcesses:
    """A controller and its webhooks beside a bare API server; certificates and logs are in one folder.

    Attributes:
        folder: where logs and certificates are.
        admission_ports, report_ports: by name of the webhook.
        health: port of health and metrics, by name of the process.
        processes: those that run.
    """

    def __init__(
        self, kubeconfig: pathlib.Path, folder: pathlib.Path, webhooks: Sequence[str] = ("webhook",), **settings: object
    ) -> None:
        self.kubeconfig, self.folder, self.settings = kubeconfig, folder, settings
        self.admission_ports = dict(zip(webhooks, free_ports(len(webhooks)), strict=True))
        self.report_ports = dict(zip(webhooks, free_ports(len(webhooks)), strict=True))
        names = ("controller", *webhooks)
        self.health = dict(zip(names, free_ports(len(names)), strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.certificates = folder / "certificates"
        self.certificates.mkdir()

    def start(self, name: str) -> None:
        """Start a process; its log is in the folder and goes on where a former one ended."""
        environment = operator_environment(
            self.kubeconfig,
            self.health[name],
            namespace="default",
            service="localhost",
            certificate_directory=self.certificates,
            admission_port=self.admission_ports.get(name, 1),
            report_port=self.report_ports.get(name, 1),
            **self.settings,
        )
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "kvshare_operator", name.partition("-")[0]]
            self.processes[name] = subprocess.Popen(command, env=environment, stderr=log, stdout=log)

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a process, as a kubelet does or worse, and wait for it."""
        process = self.processes.pop(name)
        process.send_signal(how)
        process.wait(timeout=30)

    def end_all(self) -> None:
        """End what runs; a process that does not end is killed, and its log shown."""
        stuck = []
        for name, process in list(self.processes.items()):
            try:
                self.end(name)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                stuck.append(f"{name} did not end: {self.log(name)[-2000:]}")
        assert not stuck, stuck

    def log(self, name: str) -> str:
        """What a process wrote."""
        return (self.folder / f"{name}.log").read_text()

    def ready(self, name: str) -> bool:
        """Whether a webhook is ready, asked with the one CA."""
        return ask(self.certificates, "/readyz", self.admission_ports[name])[0] == 200

    def start_all(self, kubectl: Kubectl) -> None:
        """Start the controller, mount the certificates that it issues, start the webhooks, and wait for them."""
        self.start("controller")
        until(lambda: bool(kubectl.list("secrets")), "the controller issues certificates")
        mount_certificates(kubectl, SECRET, self.certificates)
        for name in self.admission_ports:
            self.start(name)
        until(lambda: all(map(self.ready, self.admission_ports)), "all webhooks are ready")


def mount_certificates(kubectl: Kubectl, secret: str, folder: pathlib.Path) -> None:
    """Copy what the webhook would have mounted of a Secret."""
    data = kubectl.get("secret", secret)["data"]
    for key in ("tls.crt", "tls.key", "ca.crt"):
        if key in data:
            (folder / key).write_bytes(base64.b64decode(data[key]))


def ask(
    certificates: pathlib.Path, path: str, port: int, body: bytes | None = None, token: str = ""
) -> tuple[int, str]:
    """Call the webhook process over TLS; return status and text, 0 when it cannot be trusted or reached."""
    try:
        trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    except OSError as error:
        return 0, str(error)
    request = urllib.request.Request(f"https://localhost:{port}{path}", data=body)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, context=trust, timeout=10) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def metric(health_port: int, name: str) -> float:
    """The sum of a metric over all its labels, from a process's `/metrics`; 0 when it is not there."""
    with urllib.request.urlopen(f"http://localhost:{health_port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def api_writes(kubectl: Kubectl, verbs: Collection[str] = WRITING) -> dict[str, float]:
    """How many writes of every resource have reached the API server, by its own count.

    What it writes itself (leases) and reviews are left out.
    """
    found: dict[str, float] = {}
    for labels, count in _COUNTED.findall(kubectl.run("get", "--raw", "/metrics")):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if named["verb"] in verbs and named["resource"] not in _NO_STATE:
            found[named["resource"]] = found.get(named["resource"], 0) + float(count)
    return found


def looked_again(health_port: int, times: int) -> None:
    """Wait until the controller has looked at pools so many times more, however long that takes."""
    name = "kvshare_operator_reconciles_total"
    wanted = metric(health_port, name) + times
    until(lambda: metric(health_port, name) >= wanted, f"the controller looks {times} times more", 90)


def until(true: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.1)
