"""65,536 segments of one prompt on a real Mooncake with its own defaults, which a careless client wedges for good."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.rank import Rank, Shape, block_hashes
from kvshare_connector.store import mooncake as edge
from kvshare_connector.store.batches import OVER_TCP
from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.protocol import Segments
from kvshare_connector.store.settings import StoreSettings, environment
from kvshare_connector.worker import plan
from one_kind import load_plan, save_job
from testbed import mooncake

pytestmark = pytest.mark.mooncake

PROMPT, LAYERS = 2048, 32
#: Blocks at the start that a second request reads at the same time.
AGAIN = 512
#: The engine's thread may work so long to hand over a load or a save of the whole prompt.
STEP_SECONDS = 0.5
#: How long a call into Mooncake waits for the engine's thread; below Mooncake's 30 s, at which a wedged client shows.
PATIENCE = 25


class Watched:
    """Counts the segments of every call into Mooncake, and of all calls that are inside at the same time.

    Attributes:
        handed_over: what calls wait for: an engine's thread that waits for them in turn would never come back in time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handed_over = threading.Event()
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
            assert self.handed_over.wait(PATIENCE)
            try:
                return run(store, batch, call)
            finally:
                with self._lock:
                    self._inside -= local.count

        monkeypatch.setattr(edge, "_lists", counted)
        monkeypatch.setattr(MooncakeStore, "_with_retry", around)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What the engine's thread does in a step; how long others keep it from it does not count."""
        self.handed_over.clear()
        began = time.thread_time()
        yield
        assert time.thread_time() - began < STEP_SECONDS
        self.handed_over.set()


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
            with watched.step():
                writer.transfers.save(save_job(1, 0, mine, hashes, mine))
            _wait(writer)
            assert writer.done.drain_rest().unsaved == set()
            places = tuple(range(PROMPT, PROMPT + AGAIN))
            with watched.step():
                reader.transfers.load(load_plan("r1", 1, hashes, mine, 0))
                reader.transfers.load(load_plan("r2", 2, hashes[:AGAIN], places, 0))
            _wait(reader)
            assert reader.done.drain_loads() == ({"r1", "r2"}, set(), set())
            for view, want in zip(reader.views, writer.views, strict=True):
                assert torch.equal(view[:PROMPT], want)
                assert torch.equal(view[PROMPT:], want[:AGAIN])
            assert max(watched.calls) <= watched.most_at_once <= max(OVER_TCP.in_flight, LAYERS)
            assert sum(watched.calls) == PROMPT + (PROMPT + AGAIN) * LAYERS
            assert store.reopened == 0
            started = time.monotonic()
            reader.save(block_hashes(1 << 40, 64), range(64))
            reader.load(block_hashes(1 << 40, 64), range(64))
            assert time.monotonic() - started < PATIENCE
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
