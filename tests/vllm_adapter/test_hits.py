"""Hits: a block counts only when every object of it is there."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.scheduler.hits import KEYS_PER_CALL, WINDOWS, representative, search
from kvshare_layout.keys import object_key
from kvshare_layout.objects import ObjectId

NAMESPACE = "kvs1/p-test/g1/f-" + "0" * 16


def _objects(shards: int, stages: int) -> list[ObjectId]:
    return [ObjectId("full", shard, stage) for shard in range(shards) for stage in range(stages)]


def _hash(number: int) -> bytes:
    return (number * 2654435761 % (1 << 64)).to_bytes(8, "big") * 4


def _found(blocks: int, objects: Sequence[ObjectId], missing: set[tuple[int, ObjectId]]) -> tuple[int, list[int]]:
    """Result of a search, and the number of keys of each call."""
    hashes = [_hash(n) for n in range(blocks)]
    absent = {object_key(NAMESPACE, hashes[n], o.kind, o.shard, o.stage) for n, o in missing}
    steps, calls = search(NAMESPACE, hashes, objects), list[int]()
    try:
        keys = next(steps)
        while True:
            calls.append(len(keys))
            assert len(set(keys)) == len(keys)
            keys = steps.send([int(key not in absent) for key in keys])
    except StopIteration as end:
        return int(end.value), calls


@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 3), st.data())
def test_the_hit_ends_at_the_first_block_with_a_missing_object(
    blocks: int, shards: int, stages: int, data: st.DataObject
) -> None:
    """A11: whichever object of whichever block is gone."""
    objects = _objects(shards, stages)
    places = st.tuples(st.integers(0, max(0, blocks - 1)), st.sampled_from(objects))
    missing = data.draw(st.sets(places, max_size=5)) if blocks else set()
    found, _ = _found(blocks, objects, missing)
    assert found == min((number for number, _ in missing), default=blocks)


def test_a_complete_prompt_is_asked_for_once_per_object() -> None:
    """A9: exactly the keys that all ranks together would load, each once."""
    found, calls = _found(700, _objects(4, 2), set())
    assert found == 700
    assert sum(calls) == 700 * 8
    assert calls[:3] == [WINDOWS[0], WINDOWS[1], 700 - WINDOWS[0] - WINDOWS[1]]
    assert max(calls) <= KEYS_PER_CALL


def test_a_miss_costs_one_small_call() -> None:
    """The usual case of a new prompt: 64 keys, not 131,072."""
    objects = _objects(8, 2)
    first = {(0, o) for o in objects}
    assert _found(8192, objects, first) == (0, [WINDOWS[0]])


def test_representatives_spread() -> None:
    """No shard is asked for much more often than the others."""
    objects = _objects(4, 1)
    chosen = [representative(_hash(n), objects).shard for n in range(400)]
    assert all(60 < chosen.count(shard) < 140 for shard in range(4))
