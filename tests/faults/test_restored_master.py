"""A Mooncake master that is restored from a snapshot answers with bytes of other keys; digests find that."""

import contextlib
import time
from pathlib import Path

import pytest

from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.settings import StoreSettings
from sealing_rank import BLOCKS, NAMESPACE, SealingRank
from testbed import mooncake

pytestmark = pytest.mark.mooncake

SAVED = range(BLOCKS // 2)
OTHERS = range(BLOCKS // 2, BLOCKS)


def wait_for_snapshot(folder: Path) -> None:
    """Wait until the master has begun and ended a snapshot."""

    def files() -> dict[Path, float]:
        return {path: path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}

    # A master that deletes old snapshots meanwhile makes no difference: some file must be newer than now, twice.
    for _ in range(2):
        now, deadline = time.time(), time.monotonic() + 30
        while True:
            with contextlib.suppress(FileNotFoundError):
                if any(written > now for written in files().values()):
                    break
            assert time.monotonic() < deadline, "no snapshot was written"
            time.sleep(0.1)


def test_bytes_of_other_keys_after_a_restore_are_never_loaded(tmp_path: Path) -> None:
    """Objects are removed and their memory is used anew after the snapshot; the restored master knows the old keys."""
    snapshots = tmp_path / "snapshots"
    master = mooncake.start_master(tmp_path, lease_ms=60_000, snapshots=snapshots)
    node = mooncake.start_node(tmp_path, master, segment="16mb")
    store = MooncakeStore.open(StoreSettings(master.address, hostname="127.0.0.1"))
    ranks: list[SealingRank] = []
    try:
        writer = SealingRank(store, "LBNHC", filled=True)
        ranks.append(writer)
        writer.save(*SAVED)
        ranks.append(SealingRank(store, "LBHNC"))
        assert ranks[-1].load(*SAVED) == set()  # the lease that it takes is what survives a restore
        wait_for_snapshot(snapshots)
        assert store.remove_prefix(NAMESPACE) > 0
        writer.save(*OTHERS)
        master.process.kill()
        master = mooncake.start_master(tmp_path, port=master.port, lease_ms=60_000, snapshots=snapshots)
        time.sleep(3)
        reader = SealingRank(store, "LBHNC")
        ranks.append(reader)
        wrong = [block for block in SAVED if not reader.load(block) and not reader.holds(block)]
        assert wrong == []
        assert reader.counts.get("failed_keys:get:CHECKSUM_MISMATCH", 0) > 0
    finally:
        for rank in ranks:
            rank.transfers.close()
        store.close()
        node.process.stop()
        master.process.stop()
