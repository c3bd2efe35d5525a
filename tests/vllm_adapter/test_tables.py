"""Tables: what a hit needs of several groups' block tables, and what can be saved of them."""

from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.scheduler.blocks import NOWHERE, KindBlocks
from kvshare_connector.scheduler.tables import KindGroups
from kvshare_layout.kinds import FULL, Kind, Retention, needed

HASHES = [bytes([n]) for n in range(40)]


def _kind(retention: Retention) -> Kind:
    return Kind(retention.name, retention, "kv-packed", 4, 8, 4, (0,))


WINDOW = _kind(Retention("window", 8))
KINDS = KindGroups((_kind(FULL), WINDOW), ((1,), (0, 2)), lambda block_id: block_id == 0)


def _tables(blocks: int, passed: int) -> list[list[int]]:
    """Tables of a request whose windows have passed ``passed`` blocks."""
    return [[0 if group != 1 and n < passed else 100 * (group + 1) + n for n in range(blocks)] for group in range(3)]


def _all(_: bytes, __: str) -> bool:
    return True


def test_a_load_goes_to_the_blocks_that_the_engine_has_allocated() -> None:
    """All of full attention behind the local hit, and the end of the window in both of its groups."""
    full, window = KINDS.to_load(_tables(10, 8), HASHES, 3, 10)
    assert (full.kind, full.numbers) == ("full", (3, 4, 5, 6, 7, 8, 9))
    assert full.tables == ((203, 204, 205, 206, 207, 208, 209),)
    assert window == KindBlocks("window8-", (8, 9), (HASHES[8], HASHES[9]), ((108, 109), (308, 309)))


def test_a_place_that_the_engine_does_not_have_is_nowhere() -> None:
    """The null block, and a table that is too short: such a load must fail, nothing else would be right."""
    _, window = KINDS.to_load(_tables(9, 9), HASHES, 0, 10)
    assert window.tables == ((NOWHERE, NOWHERE), (NOWHERE, NOWHERE))


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 40))
def test_saves_take_what_is_there_and_never_more_than_there_is_room_for(blocks: int, passed: int, room: int) -> None:
    """No null block is ever among them, and what had no room is named, so that the next step goes on there."""
    tables, numbers = _tables(blocks, passed), list(range(blocks))
    saved, left = KINDS.to_save(tables, HASHES, numbers, _all, room)
    ids = [block_id for part in saved for block_id in part.block_ids]
    assert 0 not in ids
    assert NOWHERE not in ids
    assert len(ids) == len(set(ids)) <= room
    by_kind = {part.kind: part.numbers for part in saved}
    full, window = by_kind.get("full", ()), by_kind.get("window8-", ())
    # Full attention without a gap from the start; of the window, two blocks of the cache for each, the end.
    assert full == tuple(range(len(full)))
    assert window == tuple(range(blocks - len(window), blocks))
    there = max(0, blocks - passed)
    if 2 * there <= room:
        assert (len(window), len(full)) == (there, min(blocks, room - 2 * there))
    else:
        # What a hit at the end needs, then full attention, then the rest.
        tail = min(there, len(needed(WINDOW, blocks * 4)), room // 2)
        assert len(full) == min(blocks, room - 2 * tail)
        assert len(window) == (tail if len(full) < blocks else min(there, (room - blocks) // 2))
    assert left == sorted((set(range(passed, blocks)) - set(window)) | (set(range(blocks)) - set(full)))
    for part in saved:
        assert part.block_hashes == tuple(HASHES[n] for n in part.numbers)
        assert all(len(table) == len(part.numbers) for table in part.tables)


def test_a_kind_that_was_offered_leaves_the_other_alone() -> None:
    """Only what is missing is saved, and takes room."""
    saved, left = KINDS.to_save(_tables(4, 0), HASHES, [0, 1, 2, 3], lambda _, kind: kind == "full", 4)
    assert ([part.kind for part in saved], left) == (["full"], [])


def test_tables_of_no_groups_have_no_blocks() -> None:
    """A request that ends before it was scheduled."""
    assert KINDS.shortest(()) == 0
    assert KINDS.shortest(([1, 2, 3], [1, 2], [])) == 0
    assert KindGroups((), (), bool).shortest(([1],)) == 0


@given(st.integers(0, 12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_the_local_hit_is_what_the_engine_itself_would_find(blocks: int, full: set[int], window: set[int]) -> None:
    """Full attention without a gap, and the end of the window."""
    cached = {1: full, 0: window, 2: window}
    found = KINDS.local_hit(blocks, lambda number, groups: all(number in cached[group] for group in groups))
    valid = [
        end
        for end in range(blocks + 1)
        if set(range(end)) <= full and set(needed(WINDOW, end * 4)) <= window
    ]  # fmt: skip
    assert found == max(valid)
