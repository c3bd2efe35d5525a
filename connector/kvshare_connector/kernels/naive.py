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
    """
    position = 0
    for slot, start, heads in runs:
        part = layers[slot][:, start : start + heads][blocks].reshape(len(blocks), -1)
        _fits(position + part.shape[1], out)
        out[:, position : position + part.shape[1]] = part
        position += part.shape[1]
    _filled(position, out)


def unpack(layers: Sequence[torch.Tensor], runs: Sequence[Run], blocks: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows of bytes into the layers: the inverse of ``pack``, with the same arguments."""
    position = 0
    for slot, start, heads in runs:
        cache = layers[slot][:, start : start + heads]
        size = cache[0].numel()
        _fits(position + size, rows)
        cache[blocks] = rows[:, position : position + size].reshape(len(blocks), *cache.shape[1:])
        position += size
    _filled(position, rows)


def _fits(end: int, rows: torch.Tensor) -> None:
    if end > rows.shape[1]:
        raise ValueError(f"rows of {rows.shape[1]} bytes given for runs of at least {end} bytes")


def _filled(end: int, rows: torch.Tensor) -> None:
    if end != rows.shape[1]:
        raise ValueError(f"rows of {rows.shape[1]} bytes given for runs of {end} bytes")
