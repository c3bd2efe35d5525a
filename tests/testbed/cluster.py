"""A real one-node Kubernetes cluster on this machine, and a bare API server for contract tests.

    with cluster(Path("state"), images=[...]) as running:
        running.kubectl.apply(...)

    with api_server(Path("state")) as api:
        api.kubeconfig

Only one cluster runs on a machine at a time; what a killed one left behind is removed before the next starts.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed import places
from testbed.cluster_state import State, leftovers, own_chains_exist
from testbed.control_plane import (
    Ports,
    Programs,
    default_service_account,
    start_api_server,
    start_controllers,
)
from testbed.kubectl import Kubectl
from testbed.node_programs import DNS_ADDRESS, NODE, NODE_ADDRESS, import_image, start_containerd, start_node
from testbed.ports import free_ports
from testbed.prepare.images import PAUSE

SOCKET_PATH_LIMIT = 80


class ClusterImpossibleError(Exception):
    """This machine cannot run the cluster now; the text says why and what to do."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster or API server.

    Attributes:
        state: its folder: logs, kubeconfig, sockets.
        kubeconfig: the administrator's.
        programs: what it consists of, to pause, kill and restart it.
    """

    state: Path
    kubeconfig: Path
    programs: Programs

    @property
    def kubectl(self) -> Kubectl:
        """kubectl for it, in the namespace `default`."""
        return Kubectl(self.kubeconfig)

    def import_image(self, archive: Path) -> None:
        """Give an OCI archive to the node."""
        import_image(self.state, archive)


@contextmanager
def api_server(state: Path) -> Iterator[Cluster]:
    """etcd and kube-apiserver on free loopback ports: about two seconds; several may run side by side.

    Args:
        state: an empty or former folder for logs, data and the kubeconfig.

    Raises:
        NotReadyError: if one of them does not start, with the last lines of its log.
    """
    place = State(state)
    place.remove()
    place.open(register=False)
    programs = Programs(place, outlive_us=False)
    try:
        etcd, peers, api = free_ports(3)
        ports = Ports("127.0.0.1", etcd=etcd, etcd_peers=peers, api=api)
        yield Cluster(place.folder, start_api_server(programs, ports, advertise=NODE_ADDRESS), programs)
    finally:
        place.remove()
        for process in programs.running:
            process.popen.wait()  # they have ended; an unread end is a warning, and warnings are errors


@contextmanager
def cluster(state: Path, *, images: Sequence[Path] = (), keep: bool = False) -> Iterator[Cluster]:
    """A complete cluster that ends with the block.

    Args:
        state: its folder.
        images: OCI archives for the node.
        keep: leave it running at the end of the block, unless the block was interrupted; `remove_kept` ends it.

    Raises:
        ClusterImpossibleError: if the machine cannot run one now.
        NotReadyError: if a program does not start, with the last lines of its log.
    """
    _check_machine(state)
    missing = [archive.name for archive in images if not archive.exists()]
    if missing:
        raise ClusterImpossibleError(
            f"no image {', '.join(missing)}: the sources have changed since the preparation; run `make prepare`"
        )
    place = State(state)
    with _only_cluster():
        _remove_leftovers()
        if own_chains_exist():
            raise ClusterImpossibleError(
                "firewall chains of another Kubernetes are on this machine (iptables-save | grep KUBE-): "
                "stop that cluster first, or use it with CLUSTER=existing"
            )
        place.open()
        programs = Programs(place, outlive_us=True)
        kept = False
        try:
            yield _start(programs, images)
            kept = keep
        except Exception:
            kept = keep
            raise
        finally:
            if kept:
                place.keep()
            else:
                place.remove()
                programs.forget()


def remove_kept() -> None:
    """Remove the clusters that were kept, and what killed ones left behind."""
    with _only_cluster():
        for left in leftovers():
            left.remove()
            print(f"removed the cluster of {left.folder}", flush=True)


def _start(programs: Programs, images: Sequence[Path]) -> Cluster:
    for address in (NODE_ADDRESS, DNS_ADDRESS):
        programs.state.add_address(address)
    ports = Ports(NODE_ADDRESS)
    start_containerd(programs, PAUSE.reference)
    kubeconfig = start_api_server(programs, ports, advertise=NODE_ADDRESS)
    start_controllers(programs, ports, kubeconfig)
    running = Cluster(programs.state.folder, kubeconfig, programs)
    for archive in (PAUSE.archive, *images):
        running.import_image(archive)
    start_node(programs, kubeconfig)
    _wait_for_node(programs, running.kubectl)
    return running


def _remove_leftovers() -> None:
    """Remove what killed runs left behind; a cluster that somebody kept on purpose is not ours to end."""
    for left in leftovers():
        if left.kept():
            raise ClusterImpossibleError(
                f"a cluster is kept running in {left.folder}, and this machine can run only one: "
                "end it with `make demo-down`"
            )
        print(f"removing what a killed run left in {left.folder}", file=sys.stderr, flush=True)
        left.remove()


def _wait_for_node(programs: Programs, kubectl: Kubectl) -> None:
    def ready() -> bool:
        programs.check()
        conditions = kubectl.get("node", NODE)["status"]["conditions"]
        healthy = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
        return healthy and default_service_account(kubectl)

    kubelet = programs.named("kubelet")
    kubectl.wait_for(
        "the node is ready",
        ready,
        seconds=180,
        about=lambda: f"look at {kubelet.log} and the other logs beside it",
        pause=0.2,
    )


def _check_machine(state: Path) -> None:
    if os.geteuid() != 0:
        raise ClusterImpossibleError("a cluster needs root: containers, mounts and network namespaces")
    if len(str(state.absolute())) > SOCKET_PATH_LIMIT:
        raise ClusterImpossibleError(
            f"the state folder's path has {len(str(state.absolute()))} characters, at most {SOCKET_PATH_LIMIT} "
            f"fit beside a socket's name: choose a shorter one"
        )
    for name in ("ip", "iptables", "umount"):
        if shutil.which(name) is None:
            raise ClusterImpossibleError(f"the program `{name}` is missing: run `make prepare`")


@contextmanager
def _only_cluster() -> Iterator[None]:
    places.CACHE.mkdir(parents=True, exist_ok=True)
    with (places.CACHE / "cluster.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another cluster runs on this machine, waiting for its end", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """`python3 -m testbed.cluster down`: remove every cluster of the test bed from this machine."""
    if sys.argv[1:] != ["down"]:
        print("usage: python3 -m testbed.cluster down", file=sys.stderr)
        return 2
    remove_kept()
    return 0


if __name__ == "__main__":
    sys.exit(main())
