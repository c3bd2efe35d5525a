"""A master that is found through etcd, as `etcd://` addresses name it: real etcd, real master, real client."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.settings import StoreSettings
from testbed import mooncake
from testbed.ports import free_ports, is_open
from testbed.prepare.go_programs import program
from testbed.process import Process

pytestmark = pytest.mark.mooncake


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A leading master behind one of two etcd addresses; nobody listens at the first."""
    client, peer, rpc, metrics, dead = free_ports(5)
    url, peers = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    etcd = Process(
        "etcd",
        [
            *(program("etcd"), f"--data-dir={tmp_path / 'etcd'}", "--unsafe-no-fsync", "--log-level=error"),
            *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}"),
            *(f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"),
            f"--initial-cluster=default={peers}",
        ],
        log=tmp_path / "etcd.log",
    )
    master: Process | None = None
    try:
        etcd.wait_until(lambda: is_open(client), seconds=30, what="serve")
        master = Process(
            "replicated master",
            [
                *(mooncake.master_program(), "--enable_ha=true", "--logtostderr=1"),
                f"--etcd_endpoints=127.0.0.1:{client}",
                *("--rpc_address=127.0.0.1", f"--rpc_port={rpc}", f"--metrics_port={metrics}", "--rpc_thread_num=4"),
            ],
            log=tmp_path / "master.log",
        )
        master.wait_until(lambda: is_open(rpc), seconds=180, what="lead")
        yield f"etcd://127.0.0.1:{dead},127.0.0.1:{client}"
    finally:
        if master is not None:
            master.stop()
        etcd.stop()


def test_client_finds_the_leading_master_in_the_pools_notation(address: str) -> None:
    """Addresses separated by commas, as a pool has them; the first does not answer."""
    store = MooncakeStore.open(StoreSettings(address))
    try:
        assert list(store.exists_many(["kvs1/p-test/g1/f-0/none"])) == [False]
    finally:
        store.close()
