"""A rank without an engine that seals what it stores: caches, plan, arena and transfers on any store."""

import time

import torch

from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.worker.arena import Arena
from kvshare_connector.worker.completions import Completions
from kvshare_connector.worker.device import Lane
from kvshare_connector.worker.plan import RankPlan, make_plan
from kvshare_connector.worker.rank import Rank
from kvshare_connector.worker.transfer import Transfers
from kvshare_layout.kinds import FULL, Kind
from kvshare_layout.objects import SEAL_BYTES, shared_objects
from kvshare_layout.stages import stages_of
from one_kind import load_plan, save_job
from physical import caches, label
from poison import POISON

LAYERS, BLOCKS, HEADS, TOKENS, CELL = 2, 12, 4, 4, 8
OBJECT = LAYERS * HEADS // 2 * TOKENS * CELL
NAMESPACE = "kvs1/p-test/g1/f-" + "0" * 32


class SealingRank:
    """A rank whose transfers seal what they store."""

    def __init__(self, store: ObjectStore, layout: str, *, filled: bool = False, seal_bytes: int = SEAL_BYTES) -> None:
        self.storage, self.views = caches(layout, LAYERS, BLOCKS, HEADS, TOKENS, CELL)
        if filled:
            for layer, view in enumerate(self.views):
                view.copy_(label(layer, BLOCKS, HEADS, TOKENS, CELL))
        kind = Kind("full", FULL, "kv-packed", HEADS, CELL, TOKENS, tuple(range(LAYERS)))
        held = shared_objects(kind, 2, stages_of((0, LAYERS), kind.layers), tp=1, tp_rank=0, held_layers=kind.layers)
        self.plan: RankPlan = make_plan(held, dict(enumerate(self.views)), direct_piece_bytes=1, seal_bytes=seal_bytes)
        self.arena = Arena(16 * self.plan.slot_bytes)
        self.arena.cut(self.plan.slot_bytes)
        self.done, self.counts = Completions(), dict[str, float]()
        self.transfers = Transfers(
            Rank(NAMESPACE, self.plan, self.arena, Lane(torch.device("cpu")), lambda: store, self.done, self._count)
        )

    def _count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0) + value

    def save(self, *blocks: int) -> None:
        """Save blocks and wait."""
        self.transfers.save(save_job(1, 0, blocks, tuple(bytes([b]) * 32 for b in blocks), blocks))
        self._rest()

    def load(self, *blocks: int) -> set[int]:
        """Load blocks and wait; those that are not proven."""
        self.transfers.load(load_plan("r", 1, tuple(bytes([b]) * 32 for b in blocks), blocks))
        self._rest()
        return self.done.drain_loads()[2]

    def _rest(self) -> None:
        deadline = time.monotonic() + 30
        while self.transfers.open:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def holds(self, block: int) -> bool:
        """Whether a block has the bytes it was saved with."""
        return all(
            torch.equal(view[block], label(layer, BLOCKS, HEADS, TOKENS, CELL)[block])
            for layer, view in enumerate(self.views)
        )

    def untouched(self, block: int) -> bool:
        """Whether nobody wrote into a block."""
        return all(bool((view[block] == POISON).all()) for view in self.views)
