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
#: The engine's thread may spend this on handing over a load or a save of the whole prompt.
STEP_SECONDS = 0.1


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
    """F10: 32 segments an object, two threads that read the same keys at once into blocks of their own."""
    for name in environment(StoreSettings("127.0.0.1:1")):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(edge, "set_environment", lambda settings: None)
    monkeypatch.setitem(plan.DIRECT_PIECE_BYTES, "tcp", 1)
    watched = Watched(monkeypatch)
    with mooncake.store(tmp_path) as running:
        assert not any(name.startswith("MC_TCP_") for name in os.environ)
        store = MooncakeStore.open(StoreSettings(running.address))
        rank = Rank(Shape("LBHNC", LAYERS, 3 * PROMPT, 1, 1, 64, 1), store, torch.device("cpu"))
        try:
            assert {len(planned.pieces) for planned in rank.plan.objects} == {LAYERS}
            rank.fill(1)
            hashes = tuple(block_hashes(1, PROMPT))
            mine = tuple(range(PROMPT))
            took = [time.monotonic()]
            rank.transfers.save(SaveJob(1, 0, mine, hashes, mine))
            took.append(time.monotonic())
            _wait(rank)
            assert rank.done.drain_rest().unsaved == set()
            saved = [view[:PROMPT].clone() for view in rank.views]
            took.append(time.monotonic())
            for number in (1, 2):
                places = tuple(range(number * PROMPT, (number + 1) * PROMPT))
                rank.transfers.load(LoadPlan(f"r{number}", number, 0, hashes, places, 0))
            took.append(time.monotonic())
            _wait(rank)
            assert rank.done.drain_loads() == ({"r1", "r2"}, set())
            for view, want in zip(rank.views, saved, strict=True):
                assert torch.equal(view[PROMPT : 2 * PROMPT], want)
                assert torch.equal(view[2 * PROMPT :], want)
            assert took[1] - took[0] < STEP_SECONDS
            assert took[3] - took[2] < STEP_SECONDS
            assert max(watched.calls) <= watched.most_at_once <= MOST_SEGMENTS
            assert sum(watched.calls) == 3 * PROMPT * LAYERS
            assert store.reopened == 0
            started = time.monotonic()
            rank.save(block_hashes(1 << 40, 64), range(64))
            rank.load(block_hashes(1 << 40, 64), range(64))
            assert time.monotonic() - started < 5
            # E1: what a dashboard shows.
            assert rank.counts["segments:put"] == (PROMPT + 64) * LAYERS
            assert rank.counts["segments:get"] == (2 * PROMPT + 64) * LAYERS
        finally:
            rank.close()
            store.close()


def _wait(rank: Rank) -> None:
    deadline = time.monotonic() + 300
    while rank.transfers.open:
        assert time.monotonic() < deadline, "a transfer does not end"
        time.sleep(0.01)
