"""Tables: which places of a request's block tables a hit needs, and which of them can be saved.

Pure. A request has one table for each cache group of the engine, and a kind has one group or several. Where the engine
has no block (a window has passed it, or it has not been allocated) the table holds its null block, which is never
loaded into and never saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvshare_connector.scheduler.blocks import NOWHERE, KindBlocks
from kvshare_layout.kinds import Kind, Unknown, longest_hit, needed

#: The block tables of a request, one for each cache group of the engine, each from block 0 on.
Tables = Sequence[Sequence[int]]


@dataclass(frozen=True)
class KindGroups:
    """The kinds of a model and the engine's cache groups.

    Attributes:
        kinds: the kinds, one for every retention rule: others of the same rule lie in the same blocks.
        groups: the engine's cache groups with layers of each kind.
        is_null: whether a block of the cache is the engine's null block.
    """

    kinds: tuple[Kind, ...]
    groups: tuple[tuple[int, ...], ...]
    is_null: Callable[[int], bool]

    def local_hit(self, blocks: int, cached: Callable[[int, tuple[int, ...]], bool], *, spare: int = 0) -> int:
        """Blocks of the longest hit in the engine's own cache, at most ``blocks``.

        Args:
            blocks: blocks of the prompt.
            cached: whether a block of the prompt is there in all of some groups.
            spare: see ``needed``.
        """
        of = dict(zip((kind.name for kind in self.kinds), self.groups, strict=True))
        found = longest_hit(self.kinds, blocks, lambda kind, number: cached(number, of[kind.name]), spare=spare)
        return 0 if isinstance(found, Unknown) else found

    def to_load(self, tables: Tables, hashes: Sequence[bytes], start: int, end: int) -> tuple[KindBlocks, ...]:
        """What a hit of ``end`` blocks needs beyond the ``start`` blocks that are here.

        A place without a block is ``NOWHERE``: the engine promised to have one, so such a load must fail.
        """
        out: list[KindBlocks] = []
        for kind, groups in zip(self.kinds, self.groups, strict=True):
            numbers = range(max(start, needed(kind, end * kind.block_tokens).start), end)
            places = tuple(tuple(self._place(tables[group], number) for number in numbers) for group in groups)
            out.append(KindBlocks(kind.name, tuple(numbers), tuple(hashes[n] for n in numbers), places))
        return tuple(out)

    def to_save(
        self,
        tables: Tables,
        hashes: Sequence[bytes],
        numbers: Sequence[int],
        wanted: Callable[[bytes, str], bool],
        room: int,
    ) -> tuple[tuple[KindBlocks, ...], list[int]]:
        """What can be saved of the blocks ``numbers``, in order, within ``room`` blocks of the cache.

        Blocks that a window has passed are null: they were saved in the step that completed them, or are lost. So
        windows have the room first; full attention keeps its blocks, and can wait for the next step. Where there is no
        room for all windows, what a hit at the end of these blocks needs goes first, then full attention, then the rest
        from the end backwards: parts of many windows would be of no use. Recurrent states are not looked for in tables,
        see ``states``.

        Returns:
            the blocks, kinds without any left out; and the numbers of which something had no room, ascending.
        """
        in_tables = self._in_tables()
        found = [
            (k, number)
            for number in numbers
            for k in in_tables
            if wanted(hashes[number], self.kinds[k].name)
            and all(self._place(tables[group], number) != NOWHERE for group in self.groups[k])
        ]
        chosen: list[list[int]] = [[] for _ in self.kinds]
        left: set[int] = set()
        full: set[int] = set()  # kinds that had no room: what follows would leave a gap
        for k, number in self._most_useful_first(found, max(numbers, default=-1) + 1, room):
            if k in full or len(self.groups[k]) > room:
                full.add(k)
                left.add(number)
            else:
                room -= len(self.groups[k])
                chosen[k].append(number)
        for mine in chosen:
            mine.sort()
        blocks = tuple(
            KindBlocks(
                kind.name, tuple(mine), tuple(hashes[n] for n in mine),
                tuple(tuple(tables[group][n] for n in mine) for group in groups),
            )
            for kind, groups, mine in zip(self.kinds, self.groups, chosen, strict=True)
            if mine
        )  # fmt: skip
        return blocks, sorted(left)

    def _most_useful_first(self, found: Sequence[tuple[int, int]], end: int, room: int) -> list[tuple[int, int]]:
        """The same blocks, each a kind by position and a number, in the order in which they get the ``room``."""
        full = [one for one in found if self.kinds[one[0]].retention.rule == "full"]
        windows = [one for one in found if self.kinds[one[0]].retention.rule != "full"]
        if sum(len(self.groups[k]) for k, _ in windows) <= room:
            return [*windows, *full]
        last = {k: needed(self.kinds[k], end * self.kinds[k].block_tokens) for k, _ in windows}
        windows.reverse()
        tails = [one for one in windows if one[1] in last[one[0]]]
        return [*tails, *full, *(one for one in windows if one[1] not in last[one[0]])]

    def shortest(self, tables: Tables) -> int:
        """Blocks that every kind has places for, recurrent states aside."""
        lengths = [len(tables[g]) if g < len(tables) else 0 for k in self._in_tables() for g in self.groups[k]]
        return min(lengths, default=0)

    def _in_tables(self) -> list[int]:
        """Positions of the kinds whose blocks keep their meaning as long as they are in a table."""
        return [k for k, kind in enumerate(self.kinds) if kind.retention.rule != "state"]

    def _place(self, table: Sequence[int], number: int) -> int:
        return NOWHERE if number >= len(table) or self.is_null(table[number]) else table[number]
