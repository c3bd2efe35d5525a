"""Digests behind objects (``verify: checksum``): what was changed at rest is found, computed and saved again."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.store.memory import MemoryStore
from kvshare_connector.worker.seals import seal, sealed
from kvshare_layout.objects import SEAL_BYTES
from sealing_rank import NAMESPACE, OBJECT, SealingRank

Make = Callable[..., SealingRank]


@pytest.fixture
def rank() -> Iterator[Make]:
    """Make ranks that end with the test."""
    made: list[SealingRank] = []

    def make(store: MemoryStore, layout: str, *, filled: bool = False) -> SealingRank:
        made.append(SealingRank(store, layout, filled=filled))
        return made[-1]

    yield make
    for one in made:
        one.transfers.close()


@given(st.binary(min_size=1, max_size=200), st.integers(0, 1_000_000), st.integers(1, 255))
def test_one_changed_byte_anywhere_breaks_the_seal(data: bytes, where: int, change: int) -> None:
    """Payload or digest: every byte of a stored object counts."""
    slot = torch.zeros(len(data) + SEAL_BYTES + 7, dtype=torch.uint8)
    slot[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    seal("key", slot, len(data))
    assert sealed("key", slot, len(data))
    slot[where % (len(data) + SEAL_BYTES)] ^= change
    assert not sealed("key", slot, len(data))


def test_the_seal_of_one_key_is_not_that_of_another() -> None:
    """A store that answers with the sound bytes of another object is found out."""
    slot = torch.arange(64, dtype=torch.uint8)
    seal("ns/aa/kfulls0p0", slot, 48)
    assert not sealed("ns/ab/kfulls0p0", slot, 48)
    assert not sealed("ns/aa/kfulls1p0", slot, 48)


def test_objects_carry_their_digest_and_every_layout_reads_them(rank: Make) -> None:
    """Sixteen bytes more in the store, the same bytes in the cache; nothing goes to the cache directly."""
    store = MemoryStore()
    writer = rank(store, "LBNHC", filled=True)
    writer.save(1, 2, 3)
    assert {len(data) for data in store.contents.objects.values()} == {OBJECT + SEAL_BYTES}
    reader = rank(store, "LBHNC")
    assert not any(planned.pieces for planned in reader.plan.objects)
    assert reader.load(1, 2, 3) == set()
    assert all(reader.holds(block) for block in (1, 2, 3))


def test_a_byte_that_flips_at_rest_is_found_and_its_object_removed(rank: Make) -> None:
    """The block is computed and may be saved again; blocks before it are kept, nothing wrong reaches the cache."""
    store = MemoryStore()
    writer = rank(store, "LBNHC", filled=True)
    writer.save(1, 2, 3)
    key = next(key for key in store.keys if f"/{'02' * 32}/" in key)
    data = bytearray(store.contents.objects[key])
    data[5] ^= 1
    store.contents.objects[key] = bytes(data)
    reader = rank(store, "BLHNC")
    assert reader.load(1, 2, 3) == {2, 3}
    assert reader.holds(1)
    assert reader.untouched(2)
    assert reader.counts["failed_keys:get:CHECKSUM_MISMATCH"] == 1
    assert reader.done.drain_rest().unread == {bytes([2]) * 32}
    assert key not in store.keys
    writer.save(2)
    again = rank(store, "BLHNC")
    assert again.load(1, 2, 3) == set()
    assert again.holds(2)


def test_bytes_of_another_key_are_found(rank: Make) -> None:
    """What a restored Mooncake master can answer with: whole, sound, and somebody else's."""
    store = MemoryStore()
    rank(store, "LBNHC", filled=True).save(1, 2)
    first, second = (f"{NAMESPACE}/{digit * 32}/kfulls0p0" for digit in ("01", "02"))
    store.contents.objects[first] = store.contents.objects[second]
    reader = rank(store, "LBHNC")
    assert reader.load(1, 2) == {1, 2}
    assert reader.untouched(1)
    assert reader.counts["failed_keys:get:CHECKSUM_MISMATCH"] == 1


def test_an_object_without_digest_is_a_miss(rank: Make) -> None:
    """Another size, which cannot happen between members: their namespaces differ."""
    store = MemoryStore()
    rank(store, "LBNHC", filled=True).save(1)
    for key, data in list(store.contents.objects.items()):
        store.contents.objects[key] = data[:-SEAL_BYTES]
    reader = rank(store, "LBHNC")
    assert reader.load(1) == {1}
    assert reader.untouched(1)
