"""What every object store does, the one in memory and the real one alike."""

import ctypes
import threading
from collections.abc import Callable

import pytest

from kvshare_connector.store import codes
from kvshare_connector.store.protocol import ObjectStore, Segments, StoreSetupError, segments_bytes
from poison import POISON, Buffer

Make = Callable[[int], tuple[Buffer, int]]
Name = Callable[[str], str]


def _filled(poisoned: Make, data: bytes) -> int:
    _, address = poisoned(len(data))
    ctypes.memmove(address, data, len(data))
    return address


def _bytes(seed: int, size: int) -> bytes:
    return bytes((seed * 37 + i * 11) % 256 for i in range(size))


def test_what_is_put_comes_back_byte_for_byte(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """One object of one segment."""
    data = _bytes(1, 5000)
    target, address = poisoned(5000)
    assert store.put_many([key("a")], [[(_filled(poisoned, data), 5000)]]) == [0]
    assert store.get_many([key("a")], [[(address, 5000)]]) == [5000]
    assert bytes(target) == data


def test_segments_are_free_on_each_side(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """An object is flat: eight segments in, three odd ones out, nothing beyond them written."""
    data = _bytes(2, 4096)
    source = _filled(poisoned, data)
    assert store.put_many([key("a")], [[(source + 512 * i, 512) for i in range(8)]]) == [0]
    target, address = poisoned(6000)
    parts = [(address, 1), (address + 100, 4000), (address + 5000, 95)]
    assert store.get_many([key("a")], [parts]) == [4096]
    got = bytes(target)
    assert got[:1] + got[100:4100] + got[5000:5095] == data
    assert set(got[1:100] + got[4100:5000] + got[5095:]) == {POISON}


def test_one_missing_key_does_not_spoil_the_others(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """Results are per key, and the destination of a miss is untouched."""
    data = _bytes(3, 300)
    store.put_many([key("a"), key("c")], [[(_filled(poisoned, data), 300)]] * 2)
    target, address = poisoned(900)
    parts: list[Segments] = [[(address + 300 * i, 300)] for i in range(3)]
    assert store.get_many([key("a"), key("b"), key("c")], parts) == [300, codes.NOT_FOUND, 300]
    assert bytes(target) == data + bytes([POISON]) * 300 + data


@pytest.mark.parametrize(("asked", "answer"), [(299, codes.INVALID_PARAMS), (301, codes.TRANSFER_FAIL)])
def test_a_get_of_another_size_fails_and_writes_nothing(
    store: ObjectStore, poisoned: Make, key: Name, asked: int, answer: int
) -> None:
    """Too small and too large destinations have different codes, and neither is a success."""
    store.put_many([key("a")], [[(_filled(poisoned, _bytes(4, 300)), 300)]])
    target, address = poisoned(400)
    assert store.get_many([key("a")], [[(address, asked)]]) == [answer]
    assert set(bytes(target)) == {POISON}


def test_an_existing_key_stays_as_it_is(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """Putting it again answers 0 and changes neither bytes nor size."""
    first = _bytes(5, 200)
    store.put_many([key("a")], [[(_filled(poisoned, first), 200)]])
    assert store.put_many([key("a")], [[(_filled(poisoned, _bytes(6, 999)), 999)]]) == [0]
    target, address = poisoned(200)
    assert store.get_many([key("a")], [[(address, 200)]]) == [200]
    assert bytes(target) == first


def test_the_same_key_twice_in_a_get_fills_both(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """No destination is silently empty (case D14)."""
    data = {name: _bytes(i, 640) for i, name in enumerate("ab")}
    for name, content in data.items():
        store.put_many([key(name)], [[(_filled(poisoned, content), 640)]])
    target, address = poisoned(640 * 5)
    order = "abaab"
    parts: list[Segments] = [[(address + 640 * i, 640)] for i in range(5)]
    assert store.get_many([key(name) for name in order], parts) == [640] * 5
    assert bytes(target) == b"".join(data[name] for name in order)


def test_the_first_of_two_equal_keys_in_a_put_wins(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """Both answer 0."""
    first = _bytes(7, 128)
    parts: list[Segments] = [[(_filled(poisoned, first), 128)], [(_filled(poisoned, _bytes(8, 128)), 128)]]
    assert store.put_many([key("a"), key("a")], parts) == [0, 0]
    target, address = poisoned(128)
    assert store.get_many([key("a")], [[(address, 128)]]) == [128]
    assert bytes(target) == first


def test_empty_objects_are_refused_and_others_of_the_batch_stored(
    store: ObjectStore, poisoned: Make, key: Name
) -> None:
    """No segments, no bytes, no name."""
    good: Segments = [(_filled(poisoned, b"xy"), 2)]
    names = [key("none"), key("zero"), "", key("good")]
    expected = [codes.INVALID_PARAMS] * 3 + [0]
    assert store.put_many(names, [[], [(good[0][0], 0)], good, good]) == expected
    assert store.exists_many([names[0], names[1], names[3]]) == [0, 0, 1]


def test_exists_tells_present_from_absent(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """One number per key, in order; nothing asked, nothing answered."""
    store.put_many([key("a")], [[(_filled(poisoned, b"abc"), 3)]])
    assert store.exists_many([key("b"), key("a"), key("c"), key("a")]) == [0, 1, 0, 1]
    assert store.exists_many([]) == []


def test_remove_works_although_the_object_was_just_read(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """A lease does not protect from a reset."""
    store.put_many([key("a")], [[(_filled(poisoned, b"abc"), 3)]])
    assert store.exists_many([key("a")]) == [1]
    assert store.remove_many([key("a"), key("b")]) == [0, codes.NOT_FOUND]
    assert store.exists_many([key("a")]) == [0]


def test_small_objects_as_bytes(store: ObjectStore, key: Name) -> None:
    """The manifest: put once, read back, missing is None, a second put changes nothing."""
    assert store.get_bytes(key("manifest")) is None
    assert store.put_bytes(key("manifest"), b'{"a":1}') == 0
    assert store.put_bytes(key("manifest"), b'{"b":22}') == 0
    assert store.get_bytes(key("manifest")) == b'{"a":1}'
    assert store.put_bytes(key("empty"), b"") == codes.INVALID_PARAMS


def test_groups_are_accepted_and_wrong_lengths_are_not(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """One group per key, one list of segments per key."""
    parts: list[Segments] = [[(_filled(poisoned, b"abc"), 3)]] * 2
    names = [key("a"), key("b")]
    assert store.put_many(names, parts, [key("group")]) == [codes.INVALID_PARAMS] * 2
    assert store.put_many(names, parts[:1]) == [codes.INVALID_PARAMS] * 2
    assert store.get_many(names, parts[:1]) == [codes.INVALID_PARAMS] * 2
    assert store.put_many(names, parts, [key("group")] * 2) == [0, 0]
    assert store.exists_many(names) == [1, 1]


def test_large_batches_answer_for_every_key_in_order(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """200 keys of 20 segments are 4,000 segments: many calls inside, one answer outside (case F10)."""
    size, segments = 640, 20
    data = b"".join(_bytes(i, size) for i in range(200))
    source = _filled(poisoned, data)
    names = [key(f"n{i}") for i in range(200)]

    def parts(base: int) -> list[Segments]:
        step = size // segments
        return [[(base + size * i + step * j, step) for j in range(segments)] for i in range(200)]

    assert store.put_many(names, parts(source)) == [0] * 200
    assert store.remove_many(names[50:60]) == [0] * 10
    target, address = poisoned(len(data))
    expected = [size] * 50 + [codes.NOT_FOUND] * 10 + [size] * 140
    assert store.get_many(names, parts(address)) == expected
    hole = slice(50 * size, 60 * size)
    assert bytes(target)[: hole.start] == data[: hole.start]
    assert set(bytes(target)[hole]) == {POISON}
    assert bytes(target)[hole.stop :] == data[hole.stop :]


def test_two_clients_see_the_same_objects(open_store: Callable[[], ObjectStore], poisoned: Make, key: Name) -> None:
    """What one engine stores another one reads; both on one host, with ports of their own choice (case E6)."""
    writer, reader = open_store(), open_store()
    data = _bytes(9, 777)
    assert writer.put_many([key("a")], [[(_filled(poisoned, data), 777)]]) == [0]
    target, address = poisoned(777)
    assert reader.exists_many([key("a")]) == [1]
    assert reader.get_many([key("a")], [[(address, 777)]]) == [777]
    assert bytes(target) == data


def test_threads_share_a_client(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """Four threads put and get their own objects at once."""
    wrong: list[object] = []

    def work(number: int) -> None:
        data = _bytes(number, 16 * 512)
        source, (target, address) = _filled(poisoned, data), poisoned(len(data))
        names = [key(f"t{number}-{i}") for i in range(16)]
        put = store.put_many(names, [[(source + 512 * i, 512)] for i in range(16)])
        got = store.get_many(names, [[(address + 512 * i, 512)] for i in range(16)])
        if put != [0] * 16 or got != [512] * 16 or bytes(target) != data:
            wrong.append((number, put, got))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_is_registered_once_and_taken_back(store: ObjectStore, poisoned: Make) -> None:
    """Mistakes are named with size and code."""
    _, address = poisoned(8192)
    store.register(address, 8192)
    with pytest.raises(StoreSetupError, match=r"8192 bytes .* code -600"):
        store.register(address, 8192)
    store.unregister(address)
    with pytest.raises(StoreSetupError, match="code -600"):
        store.unregister(address)
    store.register(address, 8192)


def test_a_closed_client_answers_closed_for_ever(store: ObjectStore, poisoned: Make, key: Name) -> None:
    """No call after close crashes or raises, and closing twice is fine."""
    _, address = poisoned(16)
    store.close()
    store.close()
    names, parts = [key("a"), key("b")], [[(address, 8)], [(address, 8)]]
    assert segments_bytes(parts[0]) == 8
    for answers in (
        store.put_many(names, parts, names),
        store.get_many(names, parts),
        store.exists_many(names),
        store.remove_many(names),
    ):
        assert answers == [codes.CLOSED] * 2
    assert store.put_bytes(key("a"), b"x") == codes.CLOSED
    assert store.get_bytes(key("a")) is None
    with pytest.raises(StoreSetupError):
        store.register(address, 16)
    store.unregister(address)


def test_both_stores_are_object_stores(store: ObjectStore) -> None:
    """The interface holds at run time too."""
    assert isinstance(store, ObjectStore)
