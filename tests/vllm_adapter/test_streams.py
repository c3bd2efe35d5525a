"""An accelerator played on a CPU: everything it is given happens late, in order, and on memory of its own."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshare_connector.kernels.naive import Run
from kvshare_connector.kernels.plain import Plain
from kvshare_connector.store.memory import MemoryStore
from kvshare_connector.worker import repacking
from kvshare_connector.worker.arena import Arena
from kvshare_connector.worker.completions import Completions
from kvshare_connector.worker.device import Lane
from kvshare_connector.worker.plan import make_plan
from kvshare_connector.worker.rank import Rank as Parts
from kvshare_connector.worker.transfer import Transfers
from kvshare_layout.kinds import FULL, Kind
from kvshare_layout.objects import shared_objects
from kvshare_layout.stages import stages_of
from one_kind import load_plan, save_job
from physical import caches, label
from poison import POISON

LAYERS, BLOCKS, HEADS, TOKENS, CELL, SHARDS = 2, 40, 4, 4, 8, 2
ROOT = Path(__file__).parents[2]


class PlayedStream(Lane):
    """A stream whose work happens only when somebody waits for it; the engine's stream is a list of its own.

    Attributes:
        engine: what the engine's stream still has to do.
        pieces: rows of every copy between the arena and the device.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.engine: list[Callable[[], object]] = []
        self.pieces: list[int] = []
        self._own = threading.local()

    def give(self, work: Callable[[], object]) -> None:
        """Queue work on the transfers' stream."""
        self._own.work.append(work)

    def record(self) -> Callable[[], None]:
        """An event: waiting for it lets the engine's stream come this far."""
        work, self.engine = self.engine, []
        lock, done = threading.Lock(), threading.Event()

        def wait() -> None:
            with lock:
                if not done.is_set():
                    for item in work:
                        item()
                    done.set()

        return wait

    @contextlib.contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Queue, and at the end wait."""
        self._own.work = [event] if event is not None else []
        try:
            yield
        finally:
            time.sleep(0.002)
            for work in self._own.work:
                work()

    def rows_at_once(self, slot_bytes: int) -> int:
        """Little device memory."""
        return 3

    def scratch(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory of the device, which holds something else."""
        self.pieces.append(len(rows))
        return torch.full_like(rows, POISON)

    def to_arena(self, scratch: torch.Tensor, rows: torch.Tensor) -> None:
        """Later."""
        self.give(lambda: rows.copy_(scratch))

    def from_arena(self, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """Later."""
        self.give(lambda: scratch.copy_(rows))


class QueuedKernels(Plain):
    """Kernels that are started now and run later."""

    def __init__(self, lane: PlayedStream, layers: Sequence[torch.Tensor], objects: Sequence[Sequence[Run]]) -> None:
        super().__init__(layers, objects)
        self._lane = lane

    def pack(self, *args: Any) -> None:
        """Later."""
        self._lane.give(lambda: super(QueuedKernels, self).pack(*args))

    def unpack(self, *args: Any) -> None:
        """Later."""
        self._lane.give(lambda: super(QueuedKernels, self).unpack(*args))


def _hash(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


class Rank:
    """A rank on the played accelerator."""

    def __init__(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage, self.views = caches("LBNHC", LAYERS, BLOCKS, HEADS, TOKENS, CELL)
        kind = Kind("full", FULL, "kv-packed", HEADS, CELL, TOKENS, tuple(range(LAYERS)))
        held = shared_objects(
            kind, SHARDS, stages_of((0, LAYERS), kind.layers), tp=1, tp_rank=0, held_layers=kind.layers
        )
        plan = make_plan(held, dict(enumerate(self.views)))
        arena = Arena(4 * 8 * plan.slot_bytes)
        arena.cut(plan.slot_bytes)
        # The cache is not registered: packed transfers must never show it to the store.
        store.register(arena.buffer.data_ptr(), arena.buffer.numel())
        self.lane, self.done = PlayedStream(), Completions()
        monkeypatch.setattr(repacking, "kernels_for", lambda layers, runs, _: QueuedKernels(self.lane, layers, runs))
        self.transfers = Transfers(
            Parts("kvs1/p-test/g1", plan, arena, self.lane, lambda: store, self.done, lambda name, value: None)
        )

    def fill(self) -> None:
        """The forward pass."""
        for layer, view in enumerate(self.views):
            view.copy_(label(layer, BLOCKS, HEADS, TOKENS, CELL))

    def finish(self) -> tuple[set[str], set[int]]:
        """Wait for a load to be over; what it says."""
        deadline = time.monotonic() + 30
        while self.done.open_loads:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        finished, _, bad = self.done.drain_loads()
        return finished, bad


@pytest.fixture
def store() -> MemoryStore:
    """A store that knows registered memory only."""
    return MemoryStore(assert_registered=True)


def test_what_a_late_device_packs_arrives_whole(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """F8: behind the forward's event, through little device memory, sent only once it is in the arena."""
    rank = Rank(store, monkeypatch)
    rank.lane.engine.append(rank.fill)
    hashes = tuple(map(_hash, range(20)))
    rank.transfers.save(save_job(1, 0, tuple(range(20)), hashes, tuple(range(20))))
    while rank.transfers.open:
        time.sleep(0.001)
    assert len(store.keys) == 20 * SHARDS
    assert set(rank.lane.pieces) == {3, 2}
    for key, data in store.contents.objects.items():
        block = int.from_bytes(bytes.fromhex(key.split("/")[-2])[:4], "big")
        shard = int(key.split("/")[-1].split("s")[1].split("p")[0])
        heads = slice(2 * shard, 2 * shard + 2)
        want = torch.stack([label(n, BLOCKS, HEADS, TOKENS, CELL)[block, heads] for n in range(LAYERS)])
        assert data == bytes(want.reshape(-1).tolist())
    rank.transfers.close()


def test_a_late_device_has_unpacked_before_blocks_count_as_loaded(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8: at the moment of the report every byte is in the cache, each from its own slot, whatever is missing."""
    writer = Rank(store, monkeypatch)
    writer.fill()
    hashes = tuple(map(_hash, range(20)))
    writer.transfers.save(save_job(1, 0, tuple(range(20)), hashes, tuple(range(20))))
    while writer.transfers.open:
        time.sleep(0.001)
    gone = 13
    store.evict([key for key in store.keys if _hash(gone).hex() in key][:1])
    for _ in range(5):
        reader = Rank(store.another_client(), monkeypatch)
        reader.transfers.load(load_plan("r", 1, hashes, tuple(range(39, 19, -1)), 0))
        assert reader.finish() == ({"r"}, set(range(39 - gone, 19, -1)))
        for layer, view in enumerate(reader.views):
            want = label(layer, BLOCKS, HEADS, TOKENS, CELL)
            assert all(torch.equal(view[39 - n], want[n]) for n in range(gone))
            assert bool((view[: 39 - gone + 1] == POISON).all())
        reader.transfers.close()
    writer.transfers.close()


def test_transfers_need_neither_the_engine_nor_the_stores_library() -> None:
    """A process that has neither vLLM nor Mooncake moves blocks with the store in memory."""
    code = f"""
import os
import sys
for name in ("vllm", "mooncake"):
    sys.modules[name] = None
sys.path[:0] = [{str(ROOT / "connector")!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "vllm_adapter")!r}]
import test_streams
import pytest
with pytest.MonkeyPatch.context() as patch:
    test_streams.test_what_a_late_device_packs_arrives_whole(test_streams.MemoryStore(assert_registered=True), patch)
print("moved", flush=True)
os._exit(0)  # threads that still wait for work may abort an interpreter that tears itself down
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "moved\n"), run.stderr
