"""Transfers of one rank: every job ends in one report, and a report never says more than is proven."""

import collections
import contextlib
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvshare_connector.kernels.plain import Plain
from kvshare_connector.store import codes
from kvshare_connector.store.memory import MemoryStore
from kvshare_connector.store.protocol import Segments
from kvshare_connector.worker import items, loading, saving, transfer
from kvshare_connector.worker.arena import Arena
from kvshare_connector.worker.completions import Completions, Drained
from kvshare_connector.worker.device import Lane
from kvshare_connector.worker.plan import make_plan
from kvshare_connector.worker.rank import Rank
from kvshare_connector.worker.transfer import Transfers
from kvshare_layout import keys
from kvshare_layout.kinds import FULL, Kind
from kvshare_layout.objects import shared_objects
from kvshare_layout.stages import stages_of
from one_kind import load_plan, save_job
from physical import caches, label
from poison import POISON

LAYERS, BLOCKS, HEADS, TOKENS, CELL = 2, 40, 4, 4, 8
NAMESPACE = "kvs1/p-test/g1/f-" + "0" * 16
#: A packed, a direct, and a mixed way to move the same bytes.
WAYS = [("LBNHC", 1), ("BLHNC", 1), ("LBHNC", 1 << 20)]


class Moved:
    """A rank's transfers with a store in memory, its caches full of labels or of poison."""

    def __init__(
        self, store: Any, layout: str = "LBNHC", least: int = 1, *, lane: Lane | None = None, filled: bool = True
    ) -> None:
        self.storage, self.views = caches(layout, LAYERS, BLOCKS, HEADS, TOKENS, CELL)
        if filled:
            self.fill()
        kind = Kind("full", FULL, "kv-packed", HEADS, CELL, TOKENS, tuple(range(LAYERS)))
        held = shared_objects(kind, 2, stages_of((0, LAYERS), kind.layers), tp=1, tp_rank=0, held_layers=kind.layers)
        self.plan = make_plan(held, dict(enumerate(self.views)), direct_piece_bytes=least)
        self.arena = Arena(4 * 4 * 128)
        self.arena.cut(self.plan.slot_bytes)
        for address, size in ((self.arena.buffer.data_ptr(), self.arena.buffer.numel()),
                              (self.storage.data_ptr(), self.storage.numel())):  # fmt: skip
            if isinstance(store, MemoryStore):
                store.register(address, size)
        self.done, self.counts = Completions(), dict[str, float]()
        used = lane or Lane(torch.device("cpu"))
        self.transfers = Transfers(Rank(NAMESPACE, self.plan, self.arena, used, lambda: store, self.done, self._count))

    def _count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0) + value

    def fill(self, factor: int = 1) -> None:
        """Write every block's label, or zeros."""
        for layer, view in enumerate(self.views):
            view.copy_(label(layer, BLOCKS, HEADS, TOKENS, CELL) * factor)

    def save(self, blocks: Sequence[int], *, job: int = 1, epoch: int = 0) -> None:
        """Save blocks under hashes that name them."""
        self.transfers.save(save_job(job, epoch, tuple(range(len(blocks))), tuple(map(_hash, blocks)), tuple(blocks)))

    def load(self, hashes: Sequence[int], blocks: Sequence[int], *, generation: int = 1, epoch: int = 0) -> None:
        """Load what was saved from ``hashes`` into ``blocks``."""
        self.transfers.load(load_plan(f"r{generation}", generation, tuple(map(_hash, hashes)), tuple(blocks), epoch))

    def rest(self) -> tuple[set[str], set[int], Drained]:
        """Wait for the end of everything; requests, bad blocks, and what else there is to say."""
        deadline = time.monotonic() + 30
        while self.transfers.open:
            assert time.monotonic() < deadline, "a transfer does not end"
            time.sleep(0.0005)
        finished, _, bad = self.done.drain_loads()
        return finished, bad, self.done.drain_rest()

    def holds(self, source: int, block: int) -> bool:
        """Whether ``block`` has the bytes that block ``source`` was saved with."""
        return all(
            torch.equal(view[block], label(layer, BLOCKS, HEADS, TOKENS, CELL)[source])
            for layer, view in enumerate(self.views)
        )

    def untouched(self, block: int) -> bool:
        """Whether nobody wrote into ``block``."""
        return all(bool((view[block] == POISON).all()) for view in self.views)


def _hash(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def _until_called(store: MemoryStore, operation: str) -> None:
    """Wait until a thread is inside a call of the store."""
    deadline = time.monotonic() + 30
    while not store.counts.calls[operation]:
        assert time.monotonic() < deadline, f"no {operation}"
        time.sleep(0.001)


@pytest.fixture
def store() -> MemoryStore:
    """A store that knows registered memory only."""
    return MemoryStore(assert_registered=True)


@pytest.fixture
def moved() -> Iterator[Callable[..., Moved]]:
    """Make transfers that end with the test."""
    made: list[Moved] = []

    def make(*args: Any, **kwargs: Any) -> Moved:
        made.append(Moved(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.transfers.close()


@pytest.mark.parametrize(("layout", "least"), WAYS)
@pytest.mark.parametrize(("target", "target_least"), WAYS)
def test_what_one_rank_saves_another_loads(
    store: MemoryStore, moved: Callable[..., Moved], layout: str, least: int, target: str, target_least: int
) -> None:
    """B4, F8: packed and direct in any pair, into other blocks, from registered memory only."""
    writer, reader = moved(store, layout, least), moved(store.another_client(), target, target_least, filled=False)
    blocks = [3, 0, 17, 39, *range(5, 16)]
    writer.save(blocks)
    assert writer.rest()[2] == Drained(released=[1])
    assert len(store.keys) == 2 * len(blocks)
    places = list(range(30, 30 - len(blocks), -1))
    reader.load(blocks, places)
    finished, bad, rest = reader.rest()
    assert (finished, bad, rest) == ({"r1"}, set(), Drained())
    assert all(reader.holds(source, place) for source, place in zip(blocks, places, strict=True))
    assert all(reader.untouched(block) for block in set(range(BLOCKS)) - set(places))
    assert store.faults.duplicates_fill_last is False


@pytest.mark.parametrize(("layout", "least"), WAYS)
@pytest.mark.parametrize("gone", [0, 1, 7, 14])
def test_a_load_ends_before_the_first_block_that_is_not_complete(
    store: MemoryStore, moved: Callable[..., Moved], layout: str, least: int, gone: int
) -> None:
    """D6, D18: evicted between lookup and GET; the blocks before it are used, the others are flagged."""
    moved(store).save(range(15))
    writer_keys = 30
    while len(store.keys) < writer_keys:
        time.sleep(0.001)
    store.evict([key for key in store.keys if _hash(gone).hex() in key][1:])
    reader = moved(store.another_client(), layout, least, filled=False)
    reader.load(range(15), range(20, 35))
    finished, bad, rest = reader.rest()
    assert (finished, bad) == ({"r1"}, set(range(20 + gone, 35)))
    assert rest.unread == {_hash(gone)}
    assert all(reader.holds(n, 20 + n) for n in range(gone))


def test_a_short_read_is_no_success(store: MemoryStore, moved: Callable[..., Moved]) -> None:
    """D11: a positive number is not a proof, the exact number is."""
    one = moved(store)
    one.save(range(4))
    one.rest()
    store.faults.shorten(1, lambda key: _hash(2).hex() in key)
    one.load(range(4), range(10, 14))
    assert one.rest()[1] == {12, 13}


def _raise(*_: object, **__: object) -> Any:
    raise RuntimeError("a fault of this test")


class _Answers:
    """A store that answers with a list of the wrong length."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner

    def get_many(self, keys: Sequence[str], segments: Sequence[Segments]) -> list[int]:
        """One number less than keys."""
        return self.inner.get_many(keys, segments)[1:]


@pytest.mark.parametrize("stage", ["key", "address", "rpc", "check", "unpack", "no store", "no arena"])
def test_a_fault_in_any_stage_of_a_load_gives_one_finish_report(
    store: MemoryStore, moved: Callable[..., Moved], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """D5: the request must never stay in remote-wait, and nothing of the load counts as loaded."""
    moved(store).save(range(3))
    answers: Any = store.another_client()
    match stage:
        case "rpc":
            answers.faults.before("get", _raise)
        case "check":
            answers = _Answers(store)
        case "no store":
            answers = None
    reader = moved(answers, filled=False)
    with monkeypatch.context() as patch:
        match stage:
            case "key":
                patch.setattr(keys, "object_key", _raise)
            case "address":
                patch.setattr(loading, "_slot_address", _raise)
            case "unpack":
                patch.setattr(Plain, "unpack", _raise)
            case "no arena":
                assert reader.arena.receive.borrow()
                assert reader.arena.receive.borrow()
                reader.arena.close()
        reader.load(range(3), (5, 6, 7))
        finished, bad, _ = reader.rest()
        assert (finished, bad) == ({"r1"}, {5, 6, 7})
        assert reader.rest() == (set(), set(), Drained())


@pytest.mark.parametrize(("layout", "least"), WAYS[:2])
@pytest.mark.parametrize("fault", ["raise", codes.NO_SPACE, codes.TRANSFER_FAIL, "key", "pack", "segments"])
def test_saves_that_fail_release_their_blocks_and_their_memory(
    store: MemoryStore, moved: Callable[..., Moved], monkeypatch: pytest.MonkeyPatch, layout: str, least: int,
    fault: object,
) -> None:  # fmt: skip
    """C3: a hundred times, then one that works; nothing is lost on the way."""
    one = moved(store, layout, least)
    with monkeypatch.context() as patch:
        match fault:
            case "raise":
                store.faults.before("put", _raise)
            case "key":
                patch.setattr(keys, "object_key", _raise)
            case "pack":
                patch.setattr(Plain, "pack", _raise)
            case "segments":
                patch.setattr(saving, "direct_segments", _raise)
            case int():
                store.faults.fail("put", fault)
        for job in range(100):
            one.save([job % 20], job=job)
        _, _, rest = one.rest()
    assert sorted(rest.released) == list(range(100))
    unaffected = (layout, fault) in (("BLHNC", "pack"), ("LBNHC", "segments"))
    assert rest.unsaved == (set() if unaffected else {_hash(n) for n in range(20)})
    store.faults.clear()
    one.save([30, 31], job=1000)
    assert one.rest()[2] == Drained(released=[1000])
    assert sum(_hash(30).hex() in key for key in store.keys) == 2


def test_packed_blocks_are_released_before_they_are_sent(store: MemoryStore, moved: Callable[..., Moved]) -> None:
    """F4: pins are short although the store hangs, and what is sent later is what was packed."""
    one = moved(store)
    gate = store.faults.hang("put")
    one.save([1, 2])
    while one.done.drain_rest().released != [1]:
        time.sleep(0.001)
    for view in one.views:
        view.fill_(0)
    gate.set()
    one.rest()
    fresh = moved(store.another_client(), filled=False)
    fresh.load([1, 2], [8, 9])
    assert fresh.rest()[1] == set()
    assert fresh.holds(1, 8)


def test_direct_blocks_are_released_only_when_the_store_has_read_them(
    store: MemoryStore, moved: Callable[..., Moved]
) -> None:
    """F4: the store reads the cache itself."""
    one = moved(store, "BLHNC", 1)
    gate = store.faults.hang("put")
    one.save([1, 2])
    _until_called(store, "put")
    assert not one.done.waiting
    gate.set()
    assert one.rest()[2].released == [1]


def test_a_put_that_was_under_way_at_a_reset_does_not_stay(store: MemoryStore, moved: Callable[..., Moved]) -> None:
    """C10: and the reset is reported only after it has been taken back."""
    one = moved(store)
    gate = store.faults.hang("put")
    one.save([1, 2])
    one.save(range(10, 20), job=2)
    _until_called(store, "put")
    one.transfers.new_epoch(1)
    assert one.done.drain_rest().settled == []
    gate.set()
    rest = one.rest()[2]
    assert rest.settled == [1]
    assert store.keys == []
    one.save([1], job=3, epoch=1)
    one.rest()
    assert len(store.keys) == 2


def test_a_load_that_was_under_way_at_a_reset_proves_nothing(store: MemoryStore, moved: Callable[..., Moved]) -> None:
    """C10: its bytes are from before."""
    one = moved(store)
    one.save(range(3))
    one.rest()
    gate = store.faults.hang("get")
    one.load(range(3), (20, 21, 22))
    _until_called(store, "get")
    one.transfers.new_epoch(1)
    gate.set()
    finished, bad, rest = one.rest()
    assert (finished, bad, rest.unread) == ({"r1"}, {20, 21, 22}, set())


def test_replicas_write_in_turn_and_all_read(store: MemoryStore) -> None:
    """B3: each block is written by exactly one of four ranks with the same head."""
    kind = Kind("full", FULL, "kv-packed", 1, CELL, TOKENS, (0,))
    written = []
    for rank in range(4):
        held = shared_objects(kind, 1, stages_of((0, 1), (0,)), tp=4, tp_rank=rank, held_layers=[0])
        written.append([number for number in range(20) for item in held if item.writes(number)])
        assert len(held) == 1
    assert sorted(number for one in written for number in one) == list(range(20))
    assert {len(one) for one in written} == {5}


def test_one_call_never_exceeds_its_limits_nor_asks_for_a_key_twice(
    store: MemoryStore, moved: Callable[..., Moved]
) -> None:
    """D14, F10: 64 objects and 1,024 segments at most; two loads of the same blocks are different calls."""
    one = moved(store, "LBHNC", 1)
    seen: list[Sequence[str]] = []
    store.faults.before("get", lambda _, asked: seen.append(asked))
    one.save(range(BLOCKS))
    one.rest()
    for generation in (1, 2):
        one.load(range(BLOCKS), range(BLOCKS), generation=generation)
    assert one.rest()[:2] == ({"r1", "r2"}, set())
    assert all(len(set(asked)) == len(asked) for asked in seen)
    for operation in ("get", "put"):
        assert store.counts.most_keys[operation] <= items.OBJECTS_PER_CALL
        assert store.counts.most_segments[operation] <= items.SEGMENTS_PER_CALL


def test_a_node_that_hangs_costs_its_own_loads_and_a_bounded_time(
    store: MemoryStore, moved: Callable[..., Moved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: eight loads, some of them with a key on the hanging node; all end within a lease, here 1 s for 10 s.

    The clock is one that only hanging calls advance, for their own thread: a busy machine adds no time to it.
    """
    monkeypatch.setattr(loading, "TURN_SECONDS", 0.5)
    spent = collections.Counter[int]()
    monkeypatch.setattr(loading, "time", types.SimpleNamespace(monotonic=lambda: spent[threading.get_ident()] * 0.4))
    one = moved(store)
    one.save(range(16))
    one.rest()
    slow = {_hash(number).hex() for number in (1, 3, 5, 7, 9, 11)}

    def hang(_: str, asked: Sequence[str]) -> None:
        if any(key.split("/")[-2] in slow for key in asked):
            spent[threading.get_ident()] += 1
            time.sleep(0.01)

    store.faults.before("get", hang)
    store.faults.fail("get", codes.TRANSFER_FAIL, lambda key: key.split("/")[-2] in slow)
    for number in range(8):
        one.load([2 * number, 2 * number + 1], [20 + 2 * number, 21 + 2 * number], generation=number)
    finished, bad, _ = one.rest()
    assert 1 <= max(spent.values()) <= 2
    assert finished == {f"r{number}" for number in range(8)}
    assert all(one.holds(2 * n, 20 + 2 * n) for n in range(8) if 20 + 2 * n not in bad)
    assert {21, 23, 25, 27} <= bad
    assert 20 not in bad


def test_the_next_batch_is_read_while_the_last_one_is_unpacked(
    store: MemoryStore, moved: Callable[..., Moved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the load is over only when every batch is in the cache, although all have been read before."""
    moved(store).save(range(15))
    while len(store.keys) < 30:
        time.sleep(0.001)
    reader = moved(store.another_client(), filled=False)
    assert reader.arena.receive.slots < 15
    reads, unpack, order = threading.Semaphore(0), Plain.unpack, list[str]()
    clients: MemoryStore = reader.transfers.rank.store()  # type: ignore[assignment]

    def read(*_: object) -> None:
        order.append("read")
        reads.release()

    def late(self: Plain, *args: Any) -> None:
        # The first one waits for the second read; the last one for nobody.
        assert reads.acquire(timeout=20)
        if order.count("unpacked") == 0:
            assert reads.acquire(timeout=20)
            reads.release()
        time.sleep(0.01)
        unpack(self, *args)
        order.append("unpacked")

    clients.faults.before("get", read)
    monkeypatch.setattr(Plain, "unpack", late)
    reader.load(range(15), range(20, 35))
    assert reader.rest()[:2] == ({"r1"}, set())
    assert order.count("read") == order.count("unpacked") > 2
    assert all(reader.holds(n, 20 + n) for n in range(15))


class LateLane(Lane):
    """A device that does what it was given only after a while, as an accelerator behind its queue."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.work: list[Callable[[], None]] = []

    def record(self) -> threading.Event:
        """An event behind the work given so far."""
        event, work = threading.Event(), self.work
        self.work = []

        def run() -> None:
            time.sleep(0.03)
            for item in work:
                item()
            event.set()

        threading.Thread(target=run, daemon=True).start()
        return event

    @contextlib.contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Wait for the event."""
        if event is not None:
            assert event.wait(30)
        yield


@pytest.mark.parametrize(("layout", "least"), WAYS)
def test_saves_wait_for_a_late_device(store: MemoryStore, moved: Callable[..., Moved], layout: str, least: int) -> None:
    """F8: on the CPU everything is in order by itself; here the forward pass writes long after it was started."""
    lane = LateLane()
    one = moved(store, layout, least, lane=lane, filled=False)
    lane.work.append(one.fill)
    one.save([1, 2, 3])
    one.rest()
    reader = moved(store.another_client(), filled=False)
    reader.load([1, 2, 3], [7, 8, 9])
    assert reader.rest()[1] == set()
    assert all(reader.holds(n, n + 6) for n in (1, 2, 3))


@pytest.mark.parametrize(("layout", "least"), WAYS)
def test_loads_wait_for_what_the_device_still_writes(
    store: MemoryStore, moved: Callable[..., Moved], layout: str, least: int
) -> None:
    """F8: zeroing of new blocks, or a step of their last owner, comes first."""
    moved(store).save([1, 2, 3])
    while len(store.keys) < 6:
        time.sleep(0.001)
    lane = LateLane()
    reader = moved(store.another_client(), layout, least, lane=lane, filled=False)
    lane.work.append(lambda: reader.fill(0))
    reader.load([1, 2, 3], [7, 8, 9])
    assert reader.rest()[1] == set()
    assert all(reader.holds(n, n + 6) for n in (1, 2, 3))


def test_caches_made_for_inference_only_can_be_written(store: MemoryStore, moved: Callable[..., Moved]) -> None:
    """Engines allocate under inference mode; other threads are not in it."""
    writer = moved(store)
    writer.save([1])
    writer.rest()
    with torch.inference_mode():
        reader = moved(store.another_client(), filled=False)
    reader.load([1], [2])
    assert reader.rest()[1] == set()
    assert reader.holds(1, 2)


def test_closing_does_not_wait_for_a_store_that_hangs(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's shutdown goes on; what hangs dies with the process."""
    monkeypatch.setattr(transfer, "CLOSE_SECONDS", 0.2)
    one = Moved(store)
    gates = [store.faults.hang("put"), store.faults.hang("get")]
    one.save(range(20))
    one.load(range(3), (20, 21, 22))
    for operation in ("put", "get"):
        _until_called(store, operation)
    started = time.monotonic()
    one.transfers.close()
    assert time.monotonic() - started >= 0.2
    for gate in gates:
        gate.set()
