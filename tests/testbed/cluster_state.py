"""What a cluster leaves on the machine, recorded while it runs, and removed without a trace afterwards.

Everything is found by what the cluster itself recorded or by paths below its state folder: process ids with
start times, containers in its containerd folder, mounts below the folder, network namespaces and firewall
chains that were not there before. So removal works for a cluster whose owner was killed just as well.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed import fair_cores, places
from testbed.prepare.step import key_of
from testbed.process import Identity, Process

REGISTER = places.CACHE / "cluster-states"
"""One link for each state folder in use, so that leftovers are found wherever the folder is."""

NETWORK_NAMESPACES = Path("/run/netns")
CNI_FOLDER = Path("/var/lib/cni")
CNI_NETWORK = "kvshare-testbed"
STOP_FIRST = ("kubelet", "kube-proxy", "coredns", "kube-scheduler", "kube-controller-manager")
OWN_CHAIN = re.compile(r"^(KUBE|CNI)-")


@dataclass(frozen=True)
class Recorded:
    """One program of a cluster as the state folder remembers it."""

    name: str
    pid: int
    started: int


class State:
    """The folder of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._programs = self.folder / "programs.json"
        self._before = self.folder / "before.json"

    def in_use(self) -> bool:
        """Whether a cluster is recorded here: running, kept, or left over."""
        return self._before.exists()

    def open(self, *, register: bool = True) -> None:
        """Create the folder and note what was on the machine before.

        Args:
            register: let later runs find it as a left-over; needless when its programs die with this process.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / "pod-logs", ignore_errors=True)
        if register:
            REGISTER.mkdir(parents=True, exist_ok=True)
            link = REGISTER / key_of(str(self.folder))
            link.unlink(missing_ok=True)
            link.symlink_to(self.folder)
        before = {"namespaces": sorted(_cni_namespaces()), "addresses": [], "kept": False}
        before["session_groups"] = fair_cores.end_session_groups() if register else None
        self._before.write_text(json.dumps(before))

    def add_address(self, address: str) -> None:
        """Put an address on the loopback interface, to be removed with the cluster."""
        before = json.loads(self._before.read_text())
        before["addresses"].append(address)
        self._before.write_text(json.dumps(before))
        subprocess.run(["ip", "address", "replace", f"{address}/32", "dev", "lo"], check=True, capture_output=True)

    def keep(self) -> None:
        """Note that the cluster keeps running on purpose."""
        before = json.loads(self._before.read_text())
        self._before.write_text(json.dumps({**before, "kept": True}))

    def kept(self) -> bool:
        """Whether the cluster was kept on purpose and still runs."""
        wanted = bool(json.loads(self._before.read_text()).get("kept"))
        return wanted and any(Identity(entry.pid, entry.started).alive() for entry in self.recorded())

    def record(self, process: Process) -> None:
        """Remember a started program."""
        if process.identity is not None:
            found = Recorded(process.name, process.identity.pid, process.identity.started)
            kept = [*self.recorded(), found]
            self._programs.write_text(json.dumps([asdict(program) for program in kept], indent=1))

    def recorded(self) -> list[Recorded]:
        """The programs, in the order of their start."""
        try:
            return [Recorded(**entry) for entry in json.loads(self._programs.read_text())]
        except FileNotFoundError:
            return []

    def remove(self) -> None:
        """Stop and remove everything but logs and kubeconfig; nothing happens when nothing is recorded."""
        if not self.in_use():
            return
        programs = {program.name: Identity(program.pid, program.started) for program in self.recorded()}
        for name in STOP_FIRST:
            if name in programs:
                programs.pop(name).stop(grace_seconds=3)
        containers = self._kill_containers()
        for identity in reversed(list(programs.values())):
            identity.stop(grace_seconds=5)
        self._stop_shims()
        self._unmount()
        before = json.loads(self._before.read_text())
        # A bare API server has no addresses and no pods: namespaces that came meanwhile are somebody else's.
        for namespace in sorted(_cni_namespaces() - set(before["namespaces"])) if before["addresses"] else ():
            # Sockets of killed processes keep a namespace alive for a minute, and with its link the route to the pod's
            # address, which a pod of the next cluster has by then: it would be cut off when they time out.
            _quietly("ip", "--netns", namespace, "link", "delete", "eth0")
            _quietly("ip", "netns", "delete", namespace)
        for address in before["addresses"]:
            _quietly("ip", "address", "del", f"{address}/32", "dev", "lo")
        fair_cores.restore_session_groups(before.get("session_groups"))
        if before["addresses"]:
            for program in ("iptables", "ip6tables"):
                _remove_own_chains(program)
            _remove_cgroups()
            shutil.rmtree(CNI_FOLDER / "networks" / CNI_NETWORK, ignore_errors=True)
            for result in (CNI_FOLDER / "results").glob("*"):
                if any(container in result.name for container in containers):
                    result.unlink(missing_ok=True)
        for name in ("containerd", "kubelet", "etcd", "certificates"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._programs.unlink(missing_ok=True)
        self._before.unlink()
        (REGISTER / key_of(str(self.folder))).unlink(missing_ok=True)

    def _kill_containers(self) -> list[str]:
        """Kill the first process of every container, whose process namespace dies with it; return their ids."""
        bundles = list((self.folder / "containerd" / "state").glob("io.containerd.runtime.v2.task/*/*"))
        killed = []
        for bundle in bundles:
            with contextlib.suppress(OSError, ValueError):
                identity = Identity.of(int((bundle / "init.pid").read_text()))
                if identity and bundle.name in Path(f"/proc/{identity.pid}/cgroup").read_text():
                    os.kill(identity.pid, signal.SIGKILL)
                    killed.append(identity)
        _wait_for_end(killed)
        return [bundle.name for bundle in bundles]

    def _stop_shims(self) -> None:
        """Stop the container supervisors, which belong to nobody; they carry our socket as an argument."""
        socket = str(self.folder / "containerd.sock").encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if socket in words and words[0].endswith(b"containerd-shim-runc-v2"):
                        identity = Identity.of(int(entry.name))
                        if identity:
                            os.kill(identity.pid, signal.SIGKILL)
                            found.append(identity)
        _wait_for_end(found)

    def _unmount(self) -> None:
        for _ in range(3):
            mounts = list(_mounts_below(self.folder))
            if not mounts:
                return
            for mount in sorted(mounts, reverse=True):
                _quietly("umount", "--lazy", mount)


def leftovers() -> Iterator[State]:
    """The state folders on this machine in which a cluster is recorded."""
    for link in sorted(REGISTER.glob("*")):
        state = State(link.readlink())
        if state.in_use():
            yield state
        else:
            link.unlink(missing_ok=True)


def _wait_for_end(identities: list[Identity]) -> None:
    deadline = time.monotonic() + 5
    while any(identity.alive() for identity in identities) and time.monotonic() < deadline:
        time.sleep(0.02)


def _mounts_below(folder: Path) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split()[4])
        if target.startswith(f"{folder}/"):
            yield target


def _cni_namespaces() -> set[str]:
    if not NETWORK_NAMESPACES.is_dir():
        return set()
    return {entry.name for entry in NETWORK_NAMESPACES.iterdir() if entry.name.startswith("cni-")}


def own_chains_exist() -> bool:
    """Whether Kubernetes' firewall chains are on this machine (ours or somebody else's)."""
    return any(OWN_CHAIN.match(chain) for chain, _ in _rules("iptables", "nat"))


def _rules(program: str, table: str) -> list[tuple[str, str]]:
    """Chains (`chain, ""`) and rules (`chain, rule`) of a firewall table."""
    answer = subprocess.run([f"{program}-save", "-t", table], capture_output=True, text=True, check=False)
    found = []
    for line in answer.stdout.splitlines():
        if line.startswith(":"):
            found.append((line[1:].split()[0], ""))
        elif line.startswith("-A "):
            found.append((line.split()[1], line))
    return found


def _remove_own_chains(program: str) -> None:
    """Delete Kubernetes' and CNI's chains and the rules that lead to them; leave every other rule alone."""
    for table in ("filter", "nat", "mangle"):
        rules = _rules(program, table)
        own = [chain for chain, rule in rules if not rule and OWN_CHAIN.match(chain)]
        if not own:
            continue
        script = [f"*{table}", *(f":{chain} - [0:0]" for chain in own)]
        script += [
            rule.replace("-A ", "-D ", 1)
            for chain, rule in rules
            if rule and chain not in own and re.search(r"-[jg] (KUBE|CNI)-", rule)
        ]
        script += [*(f"-X {chain}" for chain in own), "COMMIT", ""]
        subprocess.run(
            [f"{program}-restore", "--noflush"],
            input="\n".join(script),
            text=True,
            capture_output=True,
            check=False,
        )


def _remove_cgroups() -> None:
    """Remove the empty cgroups of pods, one file system for each controller in the older cgroup version."""
    for root in [*Path("/sys/fs/cgroup").glob("kubepods"), *Path("/sys/fs/cgroup").glob("*/kubepods")]:
        for folder, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
