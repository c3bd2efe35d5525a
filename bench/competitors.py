"""Competitors: the same blocks moved in other ways, over the same Mooncake.

* One segment: objects of the same sizes that lie ready in one buffer; the bound for anything that must gather.
* vLLM's own ``MooncakeStoreConnector`` with a common Store TP size: its own functions make the segments.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from bench.rank import Rank, WrongBytesError, block_hashes
from kvshare_connector.store.mooncake import MooncakeStore


class OneSegment:
    """Objects ready in one registered buffer."""

    def __init__(self, rank: Rank, blocks: int) -> None:
        self._store, self._size = rank.store, rank.shape.object_bytes
        self._count = blocks * rank.shape.shards
        # As many buffers' worth as the arena has: objects are sent from memory that is not in the processor's caches.
        self.buffer = torch.randint(0, 256, (self._count, self._size), dtype=torch.uint8)
        self._store.register(self.buffer.data_ptr(), self.buffer.numel())
        self._segments = [[(self.buffer[n].data_ptr(), self._size)] for n in range(self._count)]

    def keys(self, first: int) -> list[str]:
        """Names as long as the product's."""
        return [f"kvs1/p-bench/g1/f-{'1' * 16}/{h.hex()}/kfulls0p0" for h in block_hashes(first << 32, self._count)]

    def save(self, keys: Sequence[str]) -> None:
        """Store all objects."""
        if any(self._store.put_many(keys, self._segments)):
            raise WrongBytesError("an object was not stored")

    def load(self, keys: Sequence[str]) -> None:
        """Read all objects."""
        if any(code != self._size for code in self._store.get_many(keys, self._segments)):
            raise WrongBytesError("an object was not read")

    def close(self) -> None:
        """Forget the buffer."""
        self._store.unregister(self.buffer.data_ptr())


class VllmShapes:
    """The objects and segments of vLLM's own connector, in the one call per request that it makes.

    Args:
        rank: whose cache is moved; its layout is LBHNC or LBNHC, vLLM's connector shares no other.
        raw: a Mooncake client of its own, with limits on segments in flight that its calls do not exceed.
    """

    def __init__(self, rank: Rank, raw: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data

        self._raw, shape = raw, rank.shape
        self._tokens = shape.tokens
        metadata = data.KeyMetadata("bench", 0, 0, 0, 0)
        classes = {"LBHNC": data.LBHNCStoreLayout, "LBNHC": data.LBNHCStoreLayout}
        self._layout = classes[shape.layout](
            metadata, shape.tokens, shape.tokens,
            local_tp_size=1, store_tp_size=shape.shards, tp_rank=0, num_kv_heads=shape.heads,
        )  # fmt: skip
        self._layout.register_kv_caches(rank.views, shape.blocks)
        self._config = __import__("mooncake.store", fromlist=["ReplicateConfig"]).ReplicateConfig()

    def _call(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> tuple[list[str], Any, Any]:
        shards = self._layout.local_shard_ids
        starts = [n * self._tokens for n in range(len(blocks))]
        chunks = [(start, start + self._tokens) for start in starts for _ in shards]
        keys = [self._layout.key_for(shard, hash_) for hash_ in hashes for shard in shards]
        addresses, sizes, _ = self._layout.prepare_values(chunks, list(blocks), list(shards) * len(blocks))
        return keys, addresses, sizes

    def save(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[str]:
        """Store blocks; returns the keys."""
        keys, addresses, sizes = self._call(hashes, blocks)
        if any(self._raw.batch_put_from_multi_buffers(keys, addresses, sizes, self._config)):
            raise WrongBytesError("vLLM's shapes: an object was not stored")
        return keys

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Read blocks."""
        keys, addresses, sizes = self._call(hashes, blocks)
        answers = self._raw.batch_get_into_multi_buffers(keys, addresses, sizes)
        if any(code != sum(parts) for code, parts in zip(answers, sizes, strict=True)):
            raise WrongBytesError("vLLM's shapes: an object was not read")


def same_bytes(store: MooncakeStore, first: str, second: str, size: int) -> bool:
    """Whether two objects hold the same bytes."""
    pair = torch.zeros((2, size), dtype=torch.uint8)
    store.register(pair.data_ptr(), pair.numel())
    try:
        answers = store.get_many([first, second], [[(pair[n].data_ptr(), size)] for n in range(2)])
    finally:
        store.unregister(pair.data_ptr())
    if answers != [size, size]:
        return False
    return ctypes.string_at(pair[0].data_ptr(), size) == ctypes.string_at(pair[1].data_ptr(), size)
