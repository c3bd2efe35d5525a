"""A prompt of 8,192 blocks on a real Mooncake with Mooncake's own defaults, which a careless client wedges for good."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.rank import Rank, Shape, block_hashes
from kvshare_connector.scheduler.loads import LoadPlan
from kvshare_connector.scheduler.saves import SaveJob
from kvshare_connector.store import mooncake as edge
from kvshare_connector.store.batches import MOST_SEGMENTS
from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.protocol import Segments
from kvshare_connector.store.settings import StoreSettings, environment
from kvshare_connector.worker import plan
from testbed import mooncake

pytestmark = pytest.mark.mooncake

PROMPT, LAYERS = 8192, 32
#: Blocks at the start that a second request reads at the same time.
AGAIN = 2048
#: The engine's thread may spend this on handing over a load or a save of the whole prompt, on a busy machine.
STEP_SECONDS = 0.5


class Watched:
    """Counts the segments of every call into Mooncake, and of all calls that are inside at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        self.most_at_once = 0
        self._inside, self._lock = 0, threading.Lock()
        lists, run = edge._lists, MooncakeStore._with_retry
        local = threading.local()

        def counted(keys: Sequence[str], segments: Sequence[Segments], batch: Sequence[int]) -> Any:
            made = lists(keys, segments, batch)
            count = sum(map(len, made[1]))
            local.count = count
            with self._lock:
                self.calls.append(count)
                self._inside += count
                self.most_at_once = max(self.most_at_once, self._inside)
            return made

        def around(store: MooncakeStore, batch: Sequence[int], call: Any) -> list[int]:
            local.count = 0
            try:
                return run(store, batch, call)
            finally:
                with self._lock:
                    self._inside -= local.count

        monkeypatch.setattr(edge, "_lists", counted)
        monkeypatch.setattr(MooncakeStore, "_with_retry", around)


def test_a_very_long_prompt_neither_wedges_mooncake_nor_holds_a_step_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10, E1: 32 segments an object, two threads that read the same keys at once into blocks of their own."""
    for name in environment(StoreSettings("127.0.0.1:1")):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(edge, "set_environment", lambda settings: None)
    monkeypatch.setitem(plan.DIRECT_PIECE_BYTES, "tcp", 1)
    watched = Watched(monkeypatch)
    with mooncake.store(tmp_path) as running:
        assert not any(name.startswith("MC_TCP_") for name in os.environ)
        store = MooncakeStore.open(StoreSettings(running.address))
        cpu, hashes, mine = torch.device("cpu"), tuple(block_hashes(1, PROMPT)), tuple(range(PROMPT))
        writer = Rank(Shape("LBHNC", LAYERS, PROMPT, 1, 1, 64, 1), store, cpu, pack_all=True)
        reader = Rank(Shape("LBHNC", LAYERS, PROMPT + AGAIN, 1, 1, 64, 1), store, cpu)
        try:
            assert {len(planned.pieces) for planned in reader.plan.objects} == {LAYERS}
            writer.fill(1)
            took = [time.monotonic()]
            writer.transfers.save(SaveJob(1, 0, mine, hashes, mine))
            took.append(time.monotonic())
            _wait(writer)
            assert writer.done.drain_rest().unsaved == set()
            took.append(time.monotonic())
            reader.transfers.load(LoadPlan("r1", 1, 0, hashes, mine, 0))
            places = tuple(range(PROMPT, PROMPT + AGAIN))
            reader.transfers.load(LoadPlan("r2", 2, 0, hashes[:AGAIN], places, 0))
            took.append(time.monotonic())
            _wait(reader)
            assert reader.done.drain_loads() == ({"r1", "r2"}, set())
            for view, want in zip(reader.views, writer.views, strict=True):
                assert torch.equal(view[:PROMPT], want)
                assert torch.equal(view[PROMPT:], want[:AGAIN])
            assert took[1] - took[0] < STEP_SECONDS
            assert took[3] - took[2] < STEP_SECONDS
            assert max(watched.calls) <= watched.most_at_once <= MOST_SEGMENTS
            assert sum(watched.calls) == PROMPT + (PROMPT + AGAIN) * LAYERS
            assert store.reopened == 0
            started = time.monotonic()
            reader.save(block_hashes(1 << 40, 64), range(64))
            reader.load(block_hashes(1 << 40, 64), range(64))
            assert time.monotonic() - started < 10
            # E1: what a dashboard shows.
            assert writer.counts["segments:put"] == PROMPT
            assert reader.counts["segments:get"] == (PROMPT + AGAIN + 64) * LAYERS
        finally:
            writer.close()
            reader.close()
            store.close()


def _wait(rank: Rank) -> None:
    deadline = time.monotonic() + 300
    while rank.transfers.open:
        assert time.monotonic() < deadline, "a transfer does not end"
        time.sleep(0.01)
