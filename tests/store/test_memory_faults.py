"""The store in memory: faults on demand, counts, and memory that nobody registered."""

import ctypes
import threading
from collections.abc import Callable, Sequence

import pytest

from kvshare_connector.store import codes
from kvshare_connector.store.memory import MemoryStore, UnregisteredMemoryError
from kvshare_connector.store.protocol import Segments
from poison import POISON, Buffer

Make = Callable[[int], tuple[Buffer, int]]


def _full(
    poisoned: Make, names: str = "abc", size: int = 10, capacity: int | None = None
) -> tuple[MemoryStore, list[Segments]]:
    store = MemoryStore(capacity=capacity)
    _, address = poisoned(size)
    ctypes.memset(address, 1, size)
    assert store.put_many(list(names), [[(address, size)]] * len(names)) == [0] * len(names)
    _, target = poisoned(size * len(names))
    return store, [[(target + size * i, size)] for i in range(len(names))]


def test_codes_by_key_and_number_of_times(poisoned: Make) -> None:
    """The rule is used up, then the store answers as usual."""
    store, parts = _full(poisoned)
    store.faults.fail("get", -800, "b", times=1)
    store.faults.fail("exists", -900, lambda key: key > "a")
    assert store.get_many(list("abc"), parts) == [10, -800, 10]
    assert store.get_many(list("abc"), parts) == [10, 10, 10]
    assert store.exists_many(list("abc")) == [1, -900, -900]


def test_a_failing_put_stores_nothing(poisoned: Make) -> None:
    """Also when the code is a success that changed nothing, as a dead writer's key gives."""
    store = MemoryStore()
    _, address = poisoned(4)
    store.faults.fail("put", -200, "a")
    store.faults.fail("put", 0, "b")
    assert store.put_many(["a", "b", "c"], [[(address, 4)]] * 3) == [-200, 0, 0]
    assert store.keys == ["c"]


def test_short_reads_report_and_fill_less(poisoned: Make) -> None:
    """The rest of the destination stays as it was (case D11)."""
    store, _ = _full(poisoned)
    target, address = poisoned(10)
    store.faults.shorten(3, "a")
    assert store.get_many(["a"], [[(address, 6), (address + 6, 4)]]) == [7]
    assert bytes(target) == b"\1" * 7 + bytes([POISON]) * 3


def test_hanging_calls_wait_for_their_release(poisoned: Make) -> None:
    """Other operations go on meanwhile."""
    store, parts = _full(poisoned)
    gate = store.faults.hang("get", "b")
    answers: list[list[int]] = []
    thread = threading.Thread(target=lambda: answers.append(store.get_many(list("abc"), parts)))
    thread.start()
    assert store.get_many(["a"], parts[:1]) == [10]
    assert not answers
    gate.set()
    thread.join()
    assert answers == [[10, 10, 10]]


def test_a_client_closed_during_a_call_answers_closed(poisoned: Make) -> None:
    """What hangs at that moment moves no bytes afterwards."""
    store, parts = _full(poisoned)
    gate = store.faults.hang("get")
    answers: list[list[int]] = []
    thread = threading.Thread(target=lambda: answers.append(store.get_many(["a"], parts[:1])))
    thread.start()
    while not store.counts.calls["get"]:
        pass
    store.close()
    gate.set()
    thread.join()
    assert answers == [[codes.CLOSED]]


def test_objects_leave_between_lookup_and_read(poisoned: Make) -> None:
    """A hook evicts just before the GET (case D6)."""
    store, parts = _full(poisoned)

    def evict(operation: str, keys: Sequence[str]) -> None:
        store.evict(["b", "b", "no such key"])

    store.faults.before("get", evict)
    assert store.exists_many(list("abc")) == [1, 1, 1]
    assert store.get_many(list("abc"), parts) == [10, codes.NOT_FOUND, 10]
    assert store.evict(lambda key: key == "c") == 1
    assert store.keys == ["a"]


def test_duplicates_can_be_lost_as_mooncake_loses_them(poisoned: Make) -> None:
    """Both are reported, only the last destination is filled."""
    store, _ = _full(poisoned)
    store.faults.duplicates_fill_last = True
    target, address = poisoned(20)
    assert store.get_many(["a", "a"], [[(address, 10)], [(address + 10, 10)]]) == [10, 10]
    assert bytes(target) == bytes([POISON]) * 10 + b"\1" * 10
    store.faults.clear()
    assert store.get_many(["a", "a"], [[(address, 10)], [(address + 10, 10)]]) == [10, 10]
    assert bytes(target) == b"\1" * 20


def test_a_full_store_has_no_space(poisoned: Make) -> None:
    """Until something leaves."""
    store, _ = _full(poisoned, "ab", capacity=25)
    _, address = poisoned(10)
    assert store.put_many(["c"], [[(address, 10)]]) == [codes.NO_SPACE]
    store.evict(["a"])
    assert store.put_many(["c"], [[(address, 10)]]) == [0]
    assert store.contents.used == 20


def test_unregistered_memory_raises_where_asked(poisoned: Make) -> None:
    """Every pointer must lie inside one registered range, first byte to last (case F8)."""
    store = MemoryStore(assert_registered=True)
    _, address = poisoned(100)
    store.register(address, 50)
    assert store.put_many(["a"], [[(address, 50)]]) == [0]
    for start, size in ((address + 50, 1), (address + 49, 2), (address - 1, 2)):
        with pytest.raises(UnregisteredMemoryError):
            store.put_many(["b"], [[(start, size)]])
        with pytest.raises(UnregisteredMemoryError):
            store.get_many(["a"], [[(start, size)]])


def test_calls_keys_segments_and_bytes_are_counted(poisoned: Make) -> None:
    """Totals, and the largest call."""
    store, parts = _full(poisoned)
    store.get_many(["a"], parts[:1])
    store.get_many(list("abc"), parts)
    store.exists_many(["a"])
    counts = store.counts
    assert counts.calls == {"put": 1, "get": 2, "exists": 1}
    assert (counts.keys["get"], counts.segments["get"], counts.bytes["get"]) == (4, 4, 40)
    assert (counts.most_keys["get"], counts.most_segments["get"]) == (3, 3)


def test_groups_leave_together(poisoned: Make) -> None:
    """The group of each object is known."""
    store = MemoryStore()
    _, address = poisoned(4)
    store.put_many(["a", "b"], [[(address, 4)]] * 2, ["g1", "g2"])
    assert store.contents.groups == {"a": "g1", "b": "g2"}
    store.evict(lambda key: store.contents.groups[key] == "g1")
    assert store.keys == ["b"]
    assert store.contents.groups == {"b": "g2"}


def test_unknown_operations_are_refused() -> None:
    """A typing mistake in a test is no silent success."""
    store = MemoryStore()
    with pytest.raises(ValueError, match="one of put, get, exists, remove expected"):
        store.faults.fail("gett", -1)
    with pytest.raises(ValueError, match="expected"):
        store.faults.hang("putt")
