"""A real Mooncake that loses its node or its master, or hangs."""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshare_connector.store import codes
from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.protocol import StoreUnavailable
from kvshare_connector.store.settings import StoreSettings
from poison import POISON, Buffer
from testbed import mooncake

pytestmark = pytest.mark.mooncake

Make = Callable[[int], tuple[Buffer, int]]


def test_a_store_without_master_is_unavailable_in_bounded_time() -> None:
    """Mooncake's own default takes 90 s."""
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 over tcp given"):
        MooncakeStore.open(StoreSettings("127.0.0.1:1", setup_seconds=6))
    assert time.monotonic() - started < 10


def test_a_killed_node_costs_codes_and_seconds_not_the_process(tmp_path: Path, poisoned: Make) -> None:
    """Reads of its objects fail without touching their destinations; exists may still say yes."""
    with mooncake.store(tmp_path, segment="64mb") as running:
        store = MooncakeStore.open(StoreSettings(running.address))
        source, address = poisoned(4096)
        ctypes.memset(address, 1, 4096)
        assert store.put_many(["k/a", "k/b"], [[(address, 4096)]] * 2) == [0, 0]
        running.nodes[0].process.kill()
        target, into = poisoned(8192)
        started = time.monotonic()
        answers = store.get_many(["k/a", "k/b", "k/c"], [[(into, 4096)], [(into + 4096, 4096)], [(into, 4096)]])
        assert time.monotonic() - started < 8
        assert all(code < 0 for code in answers)
        assert answers[2] == codes.NOT_FOUND
        assert set(bytes(target)) == {POISON}
        store.close()
        del source


def test_a_hung_node_is_given_up_after_the_progress_timeout(tmp_path: Path, poisoned: Make) -> None:
    """4 s and not 30 s, so that the leases of healthy keys live on (case F7)."""
    with mooncake.store(tmp_path, segment="64mb") as running:
        store = MooncakeStore.open(StoreSettings(running.address))
        _, address = poisoned(4096)
        assert store.put_many(["k/a"], [[(address, 4096)]]) == [0]
        running.nodes[0].process.pause()
        try:
            started = time.monotonic()
            (answer,) = store.get_many(["k/a"], [[(address, 4096)]])
            assert time.monotonic() - started < 9
            assert answer < 0
        finally:
            running.nodes[0].process.resume()
        store.close()


def test_a_restarted_master_is_found_again_without_its_keys(tmp_path: Path, poisoned: Make) -> None:
    """While it is away every call answers with codes; afterwards the same client works."""
    with mooncake.store(tmp_path, segment="64mb") as running:
        store = MooncakeStore.open(StoreSettings(running.address))
        _, address = poisoned(4096)
        assert store.put_many(["k/a"], [[(address, 4096)]]) == [0]
        running.master.process.kill()
        assert store.exists_many(["k/a"])[0] < 0
        assert store.get_bytes("k/m") is None
        running.master = mooncake.start_master(tmp_path / "again", port=running.master.port)
        deadline = time.monotonic() + 30
        while store.put_many(["k/b"], [[(address, 4096)]]) != [0] or store.exists_many(["k/b"]) != [1]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert store.exists_many(["k/a"]) == [0]
        store.close()
        store.close()


def test_closing_with_a_dead_master_returns(tmp_path: Path) -> None:
    """An engine's shutdown does not wait for a store."""
    with mooncake.store(tmp_path, segment="64mb") as running:
        store = MooncakeStore.open(StoreSettings(running.address))
        running.master.process.kill()
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < 10
        assert store.exists_many(["k"]) == [codes.CLOSED]
