"""Items: the objects of a job's blocks, one by one, and the calls in which they go to the store."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvshare_connector.scheduler.blocks import KindBlocks
from kvshare_connector.worker.plan import PlannedObject, RankPlan

#: Objects of one call to the store.
OBJECTS_PER_CALL = 64
#: Segments of one call to the store.
SEGMENTS_PER_CALL = 1024


@dataclass(frozen=True)
class Item:
    """One object of one block, to be moved.

    Attributes:
        position: of the block in its job or plan.
        block_hash: of the block.
        block_ids: in the cache, one for each cache group of the object's kind.
        planned: the object.
    """

    position: int
    block_hash: bytes
    block_ids: tuple[int, ...]
    planned: PlannedObject


def items_of(plan: RankPlan, blocks: Sequence[KindBlocks]) -> Iterator[tuple[int, Item]]:
    """Every object of a rank of ``blocks`` with the number of its block in the prompt, block by block."""
    position = 0
    for part in blocks:
        planned = [one for one in plan.objects if one.held.blocks == part.kind]
        places = zip(*part.tables, strict=True)
        for number, block_hash, block_ids in zip(part.numbers, part.block_hashes, places, strict=True):
            for one in planned:
                yield number, Item(position, block_hash, block_ids, one)
            position += 1


def direct_segments(batch: Sequence[Item]) -> list[list[tuple[int, int]]]:
    """Addresses and sizes in the cache of objects that need no packing."""
    return [item.planned.segments(item.block_ids) for item in batch]


def batches(items: Sequence[Item], slots: int = OBJECTS_PER_CALL) -> list[list[Item]]:
    """Cut items, in order, into calls that respect the limits on objects, segments and slots of staging memory."""
    out: list[list[Item]] = []
    segments = packed = 0
    for item in items:
        pieces = len(item.planned.pieces)
        full = not out or len(out[-1]) >= OBJECTS_PER_CALL or segments + max(1, pieces) > SEGMENTS_PER_CALL
        if full or (not pieces and packed >= slots):
            out.append([])
            segments = packed = 0
        out[-1].append(item)
        segments += max(1, pieces)
        packed += not pieces
    return out
