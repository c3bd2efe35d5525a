"""Naive: pack and unpack in plain torch, obviously right; the reference for every faster version.

Imports torch only. A layer is a byte view ``[B, H, ..., C]`` with any strides and a dense last axis; an object is a row
of bytes, run after run, each run dense ``[heads, ..., C]``.
"""

from collections.abc import Sequence

import torch

#: (layer slot, first head, heads) of one run of an object.
Run = tuple[int, int, int]


def pack(layers: Sequence[torch.Tensor], runs: Sequence[Run], blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Copy an object of several blocks out of the layers.

    Args:
        layers: uint8 ``[B, H, ..., C]`` each.
        runs: the object's bytes, in order.
        blocks: int64 ``[n]``, block numbers.
        out: uint8 ``[n, object bytes]``; rows may be apart.

    Raises:
        ValueError: the runs do not fill a row exactly.
        IndexError, RuntimeError: a block number is not one of the layers' blocks.
    """
    for cache, part in _pairs(layers, runs, blocks, out):
        torch.index_select(cache, 0, blocks, out=part)


def unpack(layers: Sequence[torch.Tensor], runs: Sequence[Run], blocks: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows of bytes into the layers: the inverse of ``pack``, with the same arguments.

    ``blocks`` are different numbers; blocks that are not listed and heads of no run stay as they are.
    """
    for cache, part in _pairs(layers, runs, blocks, rows):
        cache.index_copy_(0, blocks, part)


def _pairs(
    layers: Sequence[torch.Tensor], runs: Sequence[Run], blocks: torch.Tensor, rows: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every run: its heads ``[B, heads, ..., C]`` in the cache and its bytes ``[n, heads, ..., C]`` in the rows."""
    caches = [layers[slot][:, start : start + heads] for slot, start, heads in runs]
    filled = sum(cache[0].numel() for cache in caches)
    if tuple(rows.shape) != (len(blocks), filled):
        raise ValueError(f"rows of shape {tuple(rows.shape)} given, {(len(blocks), filled)} expected for these runs")
    if rows.stride(1) == 1 and all(map(whole_words, (rows, *caches))):
        # Eight bytes at a time: seven times faster on a CPU.
        rows, caches = rows.view(torch.int64), [cache.view(torch.int64) for cache in caches]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    position = 0
    for cache in caches:
        size = cache[0].numel()
        pairs.append((cache, rows[:, position : position + size].view(len(blocks), *cache.shape[1:])))
        position += size
    return pairs


def whole_words(tensor: torch.Tensor) -> bool:
    """Whether a byte tensor with a dense last axis can be looked at as 8-byte words."""
    steps = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(step % 8 == 0 for step in steps)
