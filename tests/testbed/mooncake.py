"""A real Mooncake on loopback: a master and store nodes, each a process of its own with free ports.

Store nodes own the memory; engines connect with a segment of size 0, because an engine's own segment would
disappear with the engine.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from testbed import places
from testbed.ports import free_ports, is_open
from testbed.process import Process


@dataclass
class Master:
    """A running master.

    Attributes:
        address: `host:port` for clients.
        port: the same port.
        metrics_port: HTTP: `/health`, `/metrics`, `/get_all_keys`, ...
        process: to stop, kill, pause and resume it.
    """

    address: str
    port: int
    metrics_port: int
    process: Process

    def ask(self, path: str) -> str:
        """The answer of the master's HTTP port."""
        answer = httpx.get(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=30)
        answer.raise_for_status()
        return answer.text

    def keys(self) -> list[str]:
        """All keys in the store."""
        return [line for line in self.ask("/get_all_keys").splitlines() if line]


@dataclass
class Node:
    """A running store node: process, and the HTTP port of its client."""

    http_port: int
    process: Process


@dataclass
class Store:
    """A master and its nodes."""

    master: Master
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        """`host:port` of the master, for clients."""
        return self.master.address


def master_program() -> Path:
    """The master of the Mooncake that is imported here; PYTHONPATH may lead to another version than the pinned one."""
    found = importlib.util.find_spec("mooncake")
    folder = next(iter(found.submodule_search_locations or ()), None) if found is not None else None
    return Path(folder or places.site_packages() / "mooncake") / "mooncake_master"


def start_master(
    folder: Path, *, port: int | None = None, lease_ms: int | None = None, snapshots: Path | None = None
) -> Master:
    """Start a master and wait for it.

    Args:
        folder: for its log.
        port: the port to use again after a stop; a free one when None.
        lease_ms: how long a lookup protects a key; the master's default when None.
        snapshots: folder for snapshots of the master's keys, one every second, of which the newest is restored.
    """
    chosen, metrics = free_ports(2)
    port = port or chosen
    command: list[str | Path] = [
        master_program(),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        f"--metrics_port={metrics}",
        # As many threads as cores, the default, answered some clients only after seconds on a busy two-core machine.
        "--rpc_thread_num=8",
        "--logtostderr=1",
    ]
    if lease_ms is not None:
        command.append(f"--default_kv_lease_ttl={lease_ms}")
    environment = dict(os.environ)
    if snapshots is not None:
        snapshots.mkdir(exist_ok=True)
        environment["MOONCAKE_SNAPSHOT_LOCAL_PATH"] = str(snapshots)
        command += ["--enable_snapshot", "--enable_snapshot_restore", "--snapshot_interval_seconds=1"]
        command += ["--snapshot_object_store_type=local", "--snapshot_catalog_store_type=embedded"]
    process = Process("mooncake_master", command, log=folder / "mooncake-master.log", environment=environment)
    master = Master(f"127.0.0.1:{port}", port, metrics, process)
    try:
        process.wait_until(lambda: is_open(port) and is_open(metrics), seconds=90)
    except BaseException:
        process.kill()
        raise
    return master


def start_node(folder: Path, master: Master, *, segment: str = "512mb", name: str = "0") -> Node:
    """Start a store node that lends `segment` bytes of memory, and wait until the master knows it."""
    rest, http = free_ports(2)
    environment = {
        **os.environ,
        "MOONCAKE_MASTER": master.address,
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": segment,
        "MOONCAKE_LOCAL_BUFFER_SIZE": "64mb",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "true",
        "MOONCAKE_CLIENT_HTTP_PORT": str(http),
    }
    process = Process(
        f"mooncake store node {name}",
        [places.environment_python(), "-m", "mooncake.mooncake_store_service", "--port", str(rest)],
        log=folder / f"mooncake-node-{name}.log",
        environment=environment,
    )
    try:
        process.wait_until(lambda: is_open(rest) and is_open(http), seconds=120)
    except BaseException:
        process.kill()
        raise
    return Node(http, process)


@contextmanager
def store(folder: Path, *, nodes: int = 1, segment: str = "512mb", lease_ms: int | None = None) -> Iterator[Store]:
    """A running store; its processes end with the block.

    Args:
        folder: for logs.
        nodes: number of store nodes.
        segment: memory that each node lends, with a unit.
        lease_ms: how long a lookup protects a key; the master's default when None.
    """
    running = Store(start_master(folder, lease_ms=lease_ms))
    try:
        for number in range(nodes):
            running.nodes.append(start_node(folder, running.master, segment=segment, name=str(number)))
        yield running
    finally:
        for node in running.nodes:
            node.process.stop()
        running.master.process.stop()
