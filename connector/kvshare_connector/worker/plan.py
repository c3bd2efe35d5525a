"""Plan: where the bytes of a rank's objects lie in its caches, worked out once.

Imports torch only. For every object that the rank holds there is either a list of dense pieces (then the store can
read and write the cache directly) or the runs that a pack kernel must gather. The layers of an object may belong to
several cache groups of the engine, whose blocks are in different places: what belongs to one group is one part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvshare_layout.checks import STAGING_ALIGNMENT
from kvshare_layout.objects import HeldObject, Run

#: Smallest piece, bytes, worth its own segment, by the store's protocol. Over TCP every segment is a request: 32 pieces
#: of 64 KiB took twice as long as one packed segment, pieces of 128 KiB 1.4 times. Over RDMA it is an entry of a list.
DIRECT_PIECE_BYTES = {"tcp": 256 * 1024, "rdma": 32 * 1024}


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of an object that are consecutive in the cache for every block.

    Attributes:
        address: of block 0.
        block_stride: bytes from one block to the next.
        size: bytes.
        group: position among the cache groups of the kind, whose block it is.
    """

    address: int
    block_stride: int
    size: int
    group: int = 0


@dataclass(frozen=True)
class Part:
    """Those bytes of an object whose layers belong to one cache group.

    Attributes:
        group: position among the cache groups of the kind.
        runs: for the pack kernel, ``(layer slot, first head, heads)`` in the order of the object's bytes.
        places: first byte of each run in the object; None when the runs are the whole object.
    """

    group: int
    runs: tuple[tuple[int, int, int], ...]
    places: tuple[int, ...] | None


@dataclass(frozen=True)
class PlannedObject:
    """An object with its place in this rank's caches.

    Attributes:
        held: the object.
        parts: what the pack kernel gathers, one for each cache group.
        pieces: dense pieces for direct transfers; empty when the object must be packed.
    """

    held: HeldObject
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]

    def segments(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Direct segments, addresses and bytes, of a block that is ``block_ids[g]`` in group g."""
        return [(piece.address + block_ids[piece.group] * piece.block_stride, piece.size) for piece in self.pieces]


@dataclass(frozen=True)
class RankPlan:
    """All objects of a rank.

    Attributes:
        objects: the objects, in ascending order of their ids.
        layers: byte views of the caches; the layer slots of ``Part.runs`` count in them.
        seal_bytes: bytes of the digest that follows an object's own in its slot and in the store; 0 for none.
    """

    objects: tuple[PlannedObject, ...]
    layers: tuple[torch.Tensor, ...]
    seal_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest object that must be packed, rounded up to whole cache lines."""
        largest = max((o.held.size + self.seal_bytes for o in self.objects if not o.pieces), default=0)
        return -(-largest // STAGING_ALIGNMENT) * STAGING_ALIGNMENT

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all objects in their order: what the kernels are made for."""
        return tuple(part for planned in self.objects for part in planned.parts)


def direct_limit(protocol: str, device: torch.device) -> int | None:
    """Smallest piece to transfer directly, or None for never.

    Over TCP the memory of an accelerator is always packed: not every build of the store's client can read it.
    """
    if protocol == "tcp" and device.type != "cpu":
        return None
    return DIRECT_PIECE_BYTES[protocol]


def make_plan(
    held: Sequence[HeldObject],
    caches: Mapping[int, torch.Tensor],
    groups: Mapping[int, int] | None = None,
    *,
    further: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    direct_piece_bytes: int | None = DIRECT_PIECE_BYTES["tcp"],
    seal_bytes: int = 0,
) -> RankPlan:
    """Plan a rank's objects.

    Args:
        held: the objects of a block that the rank holds.
        caches: byte views ``[B, H, ..., C]`` by layer index, the last axis dense.
        groups: position of every layer's cache group among those of its kind; None when there is one group.
        further: byte views like ``caches`` of indexers and states, by cache.
        direct_piece_bytes: smallest dense piece that is transferred directly, unless it is a whole object; None to pack
            everything.
        seal_bytes: bytes of a digest behind every object; then everything is packed, so that a load is proven in the
            arena, before anything of it reaches the cache.
    """
    if seal_bytes:
        direct_piece_bytes = None
    layers: list[torch.Tensor] = []
    slots: dict[str, dict[int, int]] = {}
    of = {"": caches, **(further or {})}
    for name, mine in of.items():
        slots[name] = {index: len(layers) + place for place, index in enumerate(sorted(mine))}
        layers += [mine[index] for index in sorted(mine)]
    objects: list[PlannedObject] = []
    for item in sorted(held, key=lambda o: o.id):
        pieces = _pieces(item.runs, of[item.cache], groups or {})
        direct = direct_piece_bytes is not None and (
            len(pieces) == 1 or min((piece.size for piece in pieces), default=0) >= max(1, direct_piece_bytes)
        )
        parts = _parts(item.runs, slots[item.cache], groups or {})
        objects.append(PlannedObject(item, parts, pieces if direct else ()))
    return RankPlan(tuple(objects), tuple(layers), seal_bytes)


def _parts(runs: Sequence[Run], slots: Mapping[int, int], groups: Mapping[int, int]) -> tuple[Part, ...]:
    """The runs of an object, group by group."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(groups.get(run.layer, 0), []).append(run)
    return tuple(
        Part(
            group,
            tuple((slots[run.layer], run.head_start, run.heads) for run in mine),
            None if len(found) == 1 else tuple(run.offset for run in mine),
        )
        for group, mine in sorted(found.items())
    )


def _pieces(runs: Sequence[Run], caches: Mapping[int, torch.Tensor], groups: Mapping[int, int]) -> tuple[Piece, ...]:
    """Dense pieces of the runs, neighbours joined; empty when any run is not dense in the cache."""
    pieces: list[Piece] = []
    for run in runs:
        cache = caches[run.layer]
        if not _dense(cache, run.heads):
            return ()
        start, group = cache.data_ptr() + run.head_start * cache.stride(1), groups.get(run.layer, 0)
        last = pieces[-1] if pieces and pieces[-1].group == group else None
        if last and last.address + last.size == start and last.block_stride == cache.stride(0):
            pieces[-1] = Piece(last.address, last.block_stride, last.size + run.size, group)
        else:
            pieces.append(Piece(start, cache.stride(0), run.size, group))
    return tuple(pieces)


def _dense(cache: torch.Tensor, heads: int) -> bool:
    """Whether ``heads`` neighbouring heads of one block are one piece of memory in canonical order."""
    expected = 1
    for axis in range(cache.dim() - 1, 0, -1):
        size = heads if axis == 1 else cache.shape[axis]
        if size > 1 and cache.stride(axis) != expected:
            return False
        expected *= cache.shape[axis] if axis > 1 else 1
    return True
