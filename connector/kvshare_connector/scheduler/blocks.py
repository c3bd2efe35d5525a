"""Blocks: where blocks of a request are in the cache, kind by kind.

Pure columns of plain values that travel to the ranks with load plans and save jobs.
"""

from dataclasses import dataclass

#: Stands for a block that has no place in the cache: the engine's null block, or one beyond the end of a table.
NOWHERE = -1


@dataclass(frozen=True)
class KindBlocks:
    """Blocks of one kind, and of further kinds that lie in the same blocks.

    Attributes:
        kind: name of the kind, which is that of its retention rule.
        numbers: numbers of the blocks in their prompt, ascending; they decide among replicas who writes.
        block_hashes: their hashes.
        tables: for each cache group of the kind, where the blocks are in it: ``tables[group][i]``.
    """

    kind: str
    numbers: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    tables: tuple[tuple[int, ...], ...]

    @property
    def block_ids(self) -> tuple[int, ...]:
        """All blocks of the cache that these are, group by group."""
        return tuple(block_id for table in self.tables for block_id in table)


class OfKinds:
    """What is planned kind by kind: the blocks of all of them together."""

    blocks: tuple[KindBlocks, ...]

    @property
    def block_ids(self) -> tuple[int, ...]:
        """All blocks of the engine's cache that take part."""
        return tuple(block_id for part in self.blocks for block_id in part.block_ids)

    @property
    def block_hashes(self) -> frozenset[bytes]:
        """Hashes of all blocks that take part."""
        return frozenset(block_hash for part in self.blocks for block_hash in part.block_hashes)
