"""etcd, kube-apiserver, controller-manager and scheduler of a one-node cluster: their flags and their start."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from testbed import audit, certificates
from testbed.cluster_state import State
from testbed.kubectl import Kubectl
from testbed.prepare.go_programs import program, search_path
from testbed.process import Process

SERVICE_NETWORK = "198.19.0.0/16"
"""Part of the range that is reserved for benchmarks, where no real host is; pods have the other half."""

ISSUER = "https://kubernetes.default.svc"


@dataclass(frozen=True)
class Ports:
    """Ports of the control plane; all listen on `address` only."""

    address: str
    etcd: int = 12379
    etcd_peers: int = 12380
    api: int = 16443
    controller_manager: int = 10257
    scheduler: int = 10259


class Programs:
    """Starts the programs of one cluster and keeps them recorded in its state folder."""

    def __init__(self, state: State, *, outlive_us: bool) -> None:
        self.state = state
        self.outlive_us = outlive_us
        self.environment = {**os.environ, "PATH": search_path()}
        for name in ("KUBECONFIG", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            self.environment.pop(name, None)
        self.running: list[Process] = []

    def start(self, name: str, *arguments: str | Path) -> Process:
        """Start one of the built programs; its log is `<name>.log` in the state folder."""
        process = Process(
            name,
            [program(name), *arguments],
            log=self.state.folder / f"{name}.log",
            environment=self.environment,
            folder=self.state.folder,
            outlives_us=self.outlive_us,
        )
        self.running.append(process)
        self.state.record(process)
        return process

    def named(self, name: str) -> Process:
        """A running program."""
        return next(process for process in self.running if process.name == name)

    def restart(self, name: str) -> Process:
        """Kill a program and start it again as it was; its former log is gone."""
        former = self.named(name)
        former.kill()
        self.running.remove(former)
        return self.start(name, *former.command[1:])

    def forget(self) -> None:
        """Take note that the programs have been ended."""
        for process in self.running:
            process.kill()
        self.running.clear()

    def check(self) -> None:
        """Raise `NotReadyError` for the first program that has ended."""
        for process in self.running:
            process.check()

    def wait(self, process: Process, ready: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Wait for a condition of one program, while none of the others may end."""

        def asked() -> bool:
            self.check()
            return ready()

        process.wait_until(asked, seconds=seconds, what=what)


def start_api_server(programs: Programs, ports: Ports, *, advertise: str) -> Path:
    """Start etcd and kube-apiserver, wait until it is ready.

    Args:
        programs: what starts and records them.
        ports: where they listen.
        advertise: the address under which pods find the API server; need not exist when there are no pods.

    Returns:
        The administrator's kubeconfig.

    Raises:
        NotReadyError: if one of them ends or is not ready in time.
    """
    folder = programs.state.folder
    client = f"http://127.0.0.1:{ports.etcd}"
    peers = f"http://127.0.0.1:{ports.etcd_peers}"
    certificates.make_signing_key(folder / "service-accounts.key")
    token = certificates.make_token(folder / "tokens.csv")
    programs.start(
        "etcd",
        f"--data-dir={folder / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--log-level=warn",
    )
    key = folder / "service-accounts.key"
    api = programs.start(
        "kube-apiserver",
        f"--etcd-servers={client}",
        f"--bind-address={ports.address}",
        f"--advertise-address={advertise}",
        f"--secure-port={ports.api}",
        f"--cert-dir={folder / 'certificates'}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--enable-admission-plugins=NodeRestriction",
        "--kubelet-preferred-address-types=InternalIP",
        *audit.flags(folder),
    )
    authority = folder / "certificates" / "apiserver.crt"
    programs.wait(api, lambda: _written(authority), seconds=90, what="write its certificate")
    kubeconfig = folder / "kubeconfig"
    certificates.write_kubeconfig(
        kubeconfig, server=f"https://{ports.address}:{ports.api}", token=token, authority=authority
    )
    programs.wait(api, lambda: _answers(kubeconfig), seconds=90, what="become ready")
    return kubeconfig


def start_controllers(programs: Programs, ports: Ports, kubeconfig: Path) -> None:
    """Start the controller manager and the scheduler; they retry by themselves, so nothing waits for them."""
    start_controller_manager(programs, ports.controller_manager, kubeconfig)
    programs.start(
        "kube-scheduler",
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={ports.scheduler}",
    )


def start_controller_manager(programs: Programs, port: int, kubeconfig: Path) -> None:
    """Start what makes pods of Deployments and StatefulSets, and service accounts of namespaces."""
    folder = programs.state.folder
    programs.start(
        "kube-controller-manager",
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--use-service-account-credentials",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--service-account-private-key-file={folder / 'service-accounts.key'}",
        f"--root-ca-file={folder / 'certificates' / 'apiserver.crt'}",
    )


def _written(certificate: Path) -> bool:
    """Whether a certificate is there to its end: who reads it while it is written trusts nobody from then on."""
    return certificate.exists() and certificate.read_text().rstrip().endswith("-----END CERTIFICATE-----")


def _answers(kubeconfig: Path) -> bool:
    words = [
        str(program("kubectl")),
        "--kubeconfig",
        str(kubeconfig),
        "--request-timeout=10s",
        "get",
        "--raw",
        "/readyz",
    ]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def default_service_account(kubectl: Kubectl) -> bool:
    """Whether the controller manager has made what every pod needs."""
    return bool(kubectl.get("serviceaccount", "default"))
