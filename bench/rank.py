"""Rank: one rank's caches, plan and transfers around any store, driven without an engine.

Imports torch and the connector's transfers only, so that it runs wherever these do, a machine with a GPU included.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvshare_connector.scheduler.blocks import KindBlocks
from kvshare_connector.scheduler.loads import LoadPlan
from kvshare_connector.scheduler.saves import SaveJob
from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.worker.arena import Arena
from kvshare_connector.worker.completions import Completions
from kvshare_connector.worker.device import Lane
from kvshare_connector.worker.plan import direct_limit, make_plan
from kvshare_connector.worker.rank import Rank as Parts
from kvshare_connector.worker.transfer import Transfers
from kvshare_layout.kinds import FULL, Kind
from kvshare_layout.objects import shared_objects
from kvshare_layout.stages import stages_of
from physical import caches

NAMESPACE = "kvs1/p-bench/g1/f-" + "0" * 16
#: Seconds after which a transfer counts as hanging.
PATIENCE_SECONDS = 120.0


class WrongBytesError(Exception):
    """A transfer moved other bytes than it should have, or did not say the truth about it."""


@dataclass(frozen=True)
class Shape:
    """A rank's cache.

    Attributes:
        layout: physical layout, one of vLLM's names.
        layers: L.
        blocks: B, blocks of the cache.
        heads: H, heads of the rank.
        tokens: N, tokens of a block.
        cell: C, bytes of one head and one token, K and V together.
        shards: Store shards that the rank's heads are cut into.
    """

    layout: str
    layers: int
    blocks: int
    heads: int
    tokens: int
    cell: int
    shards: int

    @property
    def object_bytes(self) -> int:
        """Bytes of one object: one shard of one block."""
        return self.layers * self.heads // self.shards * self.tokens * self.cell

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all shards together."""
        return self.object_bytes * self.shards


class Rank:
    """Caches with random bytes, and the transfers that move them.

    Args:
        shape: of the cache.
        store: where objects go.
        device: where the cache is.
        staging_bytes: bytes of the arena.
        pack_all: pack also what the product would transfer directly.
    """

    def __init__(
        self,
        shape: Shape,
        store: ObjectStore,
        device: torch.device,
        *,
        staging_bytes: int = 256 << 20,
        pack_all: bool = False,
    ) -> None:
        self.shape, self.store, self.device = shape, store, device
        self.storage, self.views = caches(
            shape.layout, shape.layers, shape.blocks, shape.heads, shape.tokens, shape.cell, device=device
        )
        kind = Kind("full", FULL, "kv-packed", shape.heads, shape.cell, shape.tokens, tuple(range(shape.layers)))
        held = shared_objects(
            kind, shape.shards, stages_of((0, shape.layers), kind.layers), tp=1, tp_rank=0, held_layers=kind.layers
        )
        limit = None if pack_all else direct_limit("tcp", device)
        self.plan = make_plan(held, dict(enumerate(self.views)), direct_piece_bytes=limit)
        self.arena = Arena(staging_bytes, pinned=device.type == "cuda")
        self.arena.cut(self.plan.slot_bytes)
        self._registered = [(self.arena.buffer.data_ptr(), self.arena.buffer.numel())]
        if device.type == "cpu":
            self._registered.append((self.storage.data_ptr(), self.storage.numel()))
        for address, size in self._registered:
            store.register(address, size)
        self.done, self.counts = Completions(), dict[str, float]()
        self._counting, self._job = threading.Lock(), 0
        self.transfers = Transfers(
            Parts(NAMESPACE, self.plan, self.arena, Lane(device), lambda: store, self.done, self._count)
        )

    def _count(self, name: str, value: float) -> None:
        with self._counting:
            self.counts[name] = self.counts.get(name, 0) + value

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        self.storage.random_(0, 256, generator=generator)

    def save(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Save blocks and wait until the store has them."""
        self._job += 1
        self.transfers.save(SaveJob(self._job, 0, _columns(hashes, blocks)))
        self._wait()
        if unsaved := self.done.drain_rest().unsaved:
            raise WrongBytesError(f"{len(unsaved)} of {len(blocks)} blocks were not saved")

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Load blocks and wait until they are in the cache."""
        self._job += 1
        self.transfers.load(LoadPlan(f"r{self._job}", self._job, 0, len(blocks), _columns(hashes, blocks)))
        self._wait()
        if bad := self.done.drain_loads()[2]:
            raise WrongBytesError(f"{len(bad)} of {len(blocks)} blocks were not loaded")

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.transfers.open:
            if time.monotonic() > deadline:
                raise WrongBytesError(f"a transfer did not end within {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.0002)

    def close(self) -> None:
        """Stop the threads and forget the memory."""
        self.transfers.close()
        for address, _ in self._registered:
            self.store.unregister(address)


def block_hashes(first: int, count: int) -> list[bytes]:
    """Different hashes, as long as real ones."""
    return [(first + n).to_bytes(8, "big") * 4 for n in range(count)]


def prove(rank: Rank, *, seed: int, count: int) -> None:
    """Save blocks, overwrite everything, load them into other blocks, and compare all of the memory.

    Raises:
        WrongBytesError: a byte differs, also one that should not have been touched.
    """
    chosen = torch.randperm(rank.shape.blocks, generator=torch.Generator().manual_seed(seed))[:count].tolist()
    targets = chosen[1:] + chosen[:1]
    hashes = block_hashes(seed << 32, count)
    rank.fill(seed)
    rank.save(hashes, chosen)
    expected = [view[chosen].clone() for view in rank.views]
    rank.fill(seed + 1)
    before = rank.storage.clone()
    rank.load(hashes, targets)
    for view, want in zip(rank.views, expected, strict=True):
        if not torch.equal(view[targets], want):
            raise WrongBytesError(f"{rank.shape}: a loaded block has other bytes than the saved one")
    # Put the old bytes back: then nothing may differ from before the load.
    probe = rank.storage.clone()
    for view, old in zip(rank.views, _like(rank, before), strict=True):
        view[targets] = old[targets]
    if not torch.equal(rank.storage, before):
        raise WrongBytesError(f"{rank.shape}: a load touched {int((probe != before).sum())} bytes it must not touch")


def _like(rank: Rank, storage: torch.Tensor) -> list[torch.Tensor]:
    """The layers' views in another storage of the same shape."""
    return [storage.as_strided(view.shape, view.stride(), view.storage_offset()) for view in rank.views]


def _columns(hashes: Sequence[bytes], blocks: Sequence[int]) -> tuple[KindBlocks, ...]:
    """Blocks of a prompt, from its first on."""
    return (KindBlocks("full", tuple(range(len(blocks))), tuple(hashes), (tuple(blocks),)),)
