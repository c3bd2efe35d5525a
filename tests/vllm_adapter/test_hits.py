"""Hits: a block counts only when every object of it is there."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.scheduler.hits import KEYS_PER_CALL, WINDOWS, representative, search
from kvshare_layout.keys import object_key
from kvshare_layout.kinds import FULL, Kind, Retention, needed
from kvshare_layout.objects import ObjectId

NAMESPACE = "kvs1/p-test/g1/f-" + "0" * 16


def _objects(shards: int, stages: int) -> list[ObjectId]:
    return [ObjectId("full", shard, stage) for shard in range(shards) for stage in range(stages)]


def _hash(number: int) -> bytes:
    return (number * 2654435761 % (1 << 64)).to_bytes(8, "big") * 4


def _kind(retention: Retention, tokens: int = 4) -> Kind:
    return Kind(retention.name, retention, "kv-packed", 4, 8, tokens, (0,))


def _found(
    blocks: int, kinds: Sequence[tuple[Kind, Sequence[ObjectId]]], missing: set[tuple[int, ObjectId]], spare: int = 0
) -> tuple[int, list[tuple[str, int]]]:
    """Result of a search, and kind and number of keys of each call."""
    hashes = [_hash(n) for n in range(blocks)]
    absent = {object_key(NAMESPACE, hashes[n], o.kind, o.shard, o.stage) for n, o in missing}
    steps, calls = search(NAMESPACE, hashes, kinds, spare=spare), list[tuple[str, int]]()
    asked: list[str] = []
    try:
        ask = next(steps)
        while True:
            calls.append((ask.kind, len(ask.keys)))
            asked += ask.keys
            assert ask.keys
            assert all(f"/k{ask.kind}s" in key for key in ask.keys)
            ask = steps.send([int(key not in absent) for key in ask.keys])
    except StopIteration as end:
        assert len(set(asked)) == len(asked)
        return int(end.value), calls


def _full(objects: Sequence[ObjectId]) -> list[tuple[Kind, Sequence[ObjectId]]]:
    return [(_kind(FULL), objects)]


@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 3), st.data())
def test_the_hit_ends_at_the_first_block_with_a_missing_object(
    blocks: int, shards: int, stages: int, data: st.DataObject
) -> None:
    """A11: whichever object of whichever block is gone."""
    objects = _objects(shards, stages)
    places = st.tuples(st.integers(0, max(0, blocks - 1)), st.sampled_from(objects))
    missing = data.draw(st.sets(places, max_size=5)) if blocks else set()
    found, _ = _found(blocks, _full(objects), missing)
    assert found == min((number for number, _ in missing), default=blocks)


def test_a_complete_prompt_is_asked_for_once_per_object() -> None:
    """A9: exactly the keys that all ranks together would load, each once."""
    found, asked = _found(700, _full(_objects(4, 2)), set())
    calls = [number for _, number in asked]
    assert found == 700
    assert sum(calls) == 700 * 8
    assert calls[:3] == [WINDOWS[0], WINDOWS[1], 700 - WINDOWS[0] - WINDOWS[1]]
    assert max(calls) <= KEYS_PER_CALL


def test_a_miss_costs_one_small_call() -> None:
    """The usual case of a new prompt: 64 keys, not 131,072."""
    objects = _objects(8, 2)
    first = {(0, o) for o in objects}
    assert _found(8192, _full(objects), first) == (0, [("full", WINDOWS[0])])


windows = st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True)


@given(st.integers(0, 60), st.booleans(), windows, st.integers(1, 2), st.integers(1, 2), st.integers(0, 1), st.data())
def test_the_hit_is_the_longest_for_which_every_kind_has_what_it_needs(
    blocks: int, full: bool, tokens: list[int], shards: int, stages: int, spare: int, data: st.DataObject
) -> None:
    """Against every length tried one by one; windows shorter than a block up to several times the prompt.

    With drafting it must be one that stays valid without its last block.
    """
    retentions = [*([FULL] if full else []), *(Retention("window", window) for window in tokens)]
    kinds = [
        (_kind(r), [ObjectId(r.name, shard, stage) for shard in range(shards) for stage in range(stages)])
        for r in retentions
    ]
    places = st.tuples(st.integers(0, max(0, blocks - 1)), st.sampled_from([o for _, of in kinds for o in of]))
    missing = data.draw(st.sets(places, max_size=12)) if blocks else set()
    gone = {(number, id_.kind) for number, id_ in missing}
    valid = [
        not any((number, kind.name) in gone for kind, _ in kinds for number in needed(kind, end * 4))
        for end in range(blocks + 1)
    ]
    expected = max(end for end in range(blocks + 1) if all(valid[max(0, end - spare) : end + 1]))
    assert _found(blocks, kinds, missing, spare)[0] == expected


def test_a_window_is_asked_for_its_last_blocks_only() -> None:
    """A window of 1,024 tokens is 64 blocks of 16, whatever the length of the prompt; each key once."""
    kinds = [
        (_kind(FULL, 16), _objects(4, 1)),
        (_kind(Retention("window", 1024), 16), [ObjectId("window1024-", s, 0) for s in range(4)]),
    ]
    found, calls = _found(4000, kinds, set())
    assert found == 4000
    assert sum(number for kind, number in calls if kind == "full") == 4000 * 4
    assert [number for kind, number in calls if kind != "full"] == [64, 64 * 3]


def test_windows_that_have_left_the_store_cost_few_calls() -> None:
    """All blocks of full attention are there and none of the window: a miss, found in growing steps."""
    window = [ObjectId("window1024-", s, 0) for s in range(4)]
    kinds = [(_kind(FULL, 16), _objects(4, 1)), (_kind(Retention("window", 1024), 16), window)]
    found, calls = _found(4000, kinds, {(n, o) for n in range(4000) for o in window})
    assert found == 0
    assert sum(number for kind, number in calls if kind != "full") == 4000
    assert sum(kind != "full" for kind, _ in calls) == 4


def test_representatives_spread() -> None:
    """No shard is asked for much more often than the others."""
    objects = _objects(4, 1)
    chosen = [representative(_hash(n), objects).shard for n in range(400)]
    assert all(60 < chosen.count(shard) < 140 for shard in range(4))
