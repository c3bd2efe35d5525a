"""Transfer: the threads that move a rank's blocks between its caches and the store.

Imports neither vLLM nor Mooncake: it works on a plan, an arena and any ``ObjectStore``. One thread packs and one
puts, two get and two unpack. Every job ends in exactly one report, whatever happens on the way.
"""

import functools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvshare_connector import counters
from kvshare_connector.kernels.choice import Kernels, kernels_for
from kvshare_connector.lines import Rarely
from kvshare_connector.scheduler.loads import LoadPlan
from kvshare_connector.scheduler.saves import SaveJob
from kvshare_connector.store import codes
from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.worker.arena import HALVES, Arena, Half
from kvshare_connector.worker.completions import Completions
from kvshare_connector.worker.device import Lane
from kvshare_connector.worker.plan import PlannedObject, RankPlan
from kvshare_connector.worker.seals import seal, sealed
from kvshare_layout import keys

logger = logging.getLogger(__name__)

#: Objects of one call to the store.
OBJECTS_PER_CALL = 64
#: Segments of one call to the store.
SEGMENTS_PER_CALL = 1024
#: Threads that get, and threads that unpack: a batch goes into the cache while the next one comes from the store.
GETTERS = HALVES
#: Seconds that a load may wait for its turn behind calls that hang; half of Mooncake's default lease.
TURN_SECONDS = 5.0
#: Seconds that closing waits for calls that hang.
CLOSE_SECONDS = 2.0

Count = Callable[[str, float], None]


@dataclass(frozen=True)
class Item:
    """One object of one block, to be moved.

    Attributes:
        position: of the block in its job or plan.
        block_hash: of the block.
        block_id: in the cache.
        planned: the object.
    """

    position: int
    block_hash: bytes
    block_id: int
    planned: PlannedObject


@dataclass
class _Sending:
    """A batch on its way to the store."""

    items: Sequence[Item]
    segments: list[list[tuple[int, int]]]
    epoch: int
    half: Half | None
    after: Callable[[], None] | None


@dataclass(frozen=True)
class _Unpacking:
    """A batch that has been read and is on its way into the cache."""

    order: Sequence[Item]
    arrived: Sequence[bool]
    first_bad: int | None
    half: Half
    done: Future[None]


class Transfers:
    """Moves blocks for one rank.

    Args:
        namespace: prefix of all keys.
        plan: the rank's objects.
        arena: staging memory, cut for the plan.
        lane: the device.
        store: returns the client, or None while there is none.
        completions: where results go.
        count: adds to a counter by name.
        epoch: number of resets so far.
    """

    def __init__(
        self,
        namespace: str,
        plan: RankPlan,
        arena: Arena,
        lane: Lane,
        store: Callable[[], ObjectStore | None],
        completions: Completions,
        count: Count,
        *,
        epoch: int = 0,
    ) -> None:
        self._namespace, self._plan, self._arena, self._lane = namespace, plan, arena, lane
        self._store, self._completions, self._count = store, completions, count
        self.epoch = epoch
        self._numbers = {planned.held.id: number for number, planned in enumerate(plan.objects)}
        self._made: Kernels | None = None
        self._making = threading.Lock()
        self._rarely = Rarely(logger)
        self._open, self._open_lock = 0, threading.Lock()
        self._saves: queue.SimpleQueue[tuple[SaveJob | int, Any] | None] = queue.SimpleQueue()
        self._sending: queue.SimpleQueue[_Sending | Callable[[], None] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[tuple[LoadPlan, float, Any] | None] = queue.SimpleQueue()
        self._unpacks: queue.SimpleQueue[_Unpacking | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"kvshare-{name}", daemon=True)
            for name, target in (
                ("pack", self._pack_loop),
                ("put", self._put_loop),
                *((f"get-{number}", self._get_loop) for number in range(GETTERS)),
            )
        ]
        self._unpackers = [
            threading.Thread(target=self._unpack_loop, name=f"kvshare-unpack-{number}", daemon=True)
            for number in range(GETTERS)
        ]
        for thread in (*self._threads, *self._unpackers):
            thread.start()

    # What the engine's thread calls; nothing here waits.

    def load(self, plan: LoadPlan) -> None:
        """Start a load, behind everything that the device still does with these blocks for earlier owners."""
        if self._completions.load_started(plan.generation, plan.request_id):
            self._begun()
            self._loads.put((plan, time.monotonic(), self._lane.record()))

    def save(self, job: SaveJob) -> None:
        """Start a save of blocks whose values are in the cache once the device has come this far."""
        self._completions.save_started(job.job_id)
        self._begun()
        self._saves.put((job, self._lane.record()))

    def new_epoch(self, epoch: int) -> None:
        """The cache was reset: open jobs are void, and the epoch is reported once the last of them has landed."""
        self.epoch = epoch
        self._begun()
        self._saves.put((epoch, None))

    @property
    def open(self) -> bool:
        """Whether any job, batch or epoch is still under way."""
        with self._open_lock:
            return self._open > 0

    def _begun(self) -> None:
        with self._open_lock:
            self._open += 1

    def _ended(self) -> None:
        with self._open_lock:
            self._open -= 1

    def _send(self, work: "_Sending | Callable[[], None]") -> None:
        self._begun()
        self._sending.put(work)

    def close(self) -> None:
        """Stop; what is under way in the store is left to itself."""
        self._saves.put(None)
        for _ in range(GETTERS):
            self._loads.put(None)
        self._sending.put(None)
        self._arena.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        for _ in range(GETTERS):  # not before: what has been read is unpacked, and nobody waits for it in vain
            self._unpacks.put(None)

    # Saving.

    def _pack_loop(self) -> None:
        while (work := self._saves.get()) is not None:
            job, event = work
            if isinstance(job, int):
                self._send(functools.partial(self._completions.settled, job))
                self._ended()
                continue
            items = [
                Item(i, h, b, planned)
                for i, (number, h, b) in enumerate(zip(job.numbers, job.block_hashes, job.block_ids, strict=True))
                for planned in self._plan.objects
                if planned.held.writes(number)
            ]
            direct = [item for item in items if item.planned.pieces]
            try:
                self._pack(job, [item for item in items if not item.planned.pieces], event)
                self._send_direct(job, direct, event)
            except Exception:
                self._rarely.exception("a save was given up, its blocks will be a miss: please report it")
                self._completions.save_failed(job.block_hashes)
                direct = []
            finally:
                # Direct saves are read from the cache while they are sent, so their blocks are released afterwards.
                if not direct:
                    self._completions.save_released(job.job_id)
                self._send(functools.partial(self._completions.save_landed, job.job_id))
                self._ended()

    def _pack(self, job: SaveJob, items: Sequence[Item], event: Any) -> None:
        for start in range(0, len(items), step := max(1, min(OBJECTS_PER_CALL, self._arena.send.slots))):
            batch = sorted(items[start : start + step], key=lambda item: item.planned.held.id)
            if self._void(job.epoch):
                return
            half = self._arena.send.borrow(len(batch))
            if half is None:
                raise RuntimeError("the staging arena is closed")
            try:
                self._gather(batch, half, event)
                if self._plan.seal_bytes:
                    for slot, item in enumerate(batch):
                        seal(self._key(item), half.memory[slot], item.planned.held.size)
            except Exception:
                self._arena.send.give_back(half)
                raise
            segments = [[(half.address(slot), self._stored_bytes(item))] for slot, item in enumerate(batch)]
            self._send(_Sending(batch, segments, job.epoch, half, None))

    def _gather(self, batch: Sequence[Item], half: Half, event: Any) -> None:
        """Pack a batch into the slots of ``half``."""
        objects, blocks = self._tabulate(batch)
        with torch.inference_mode(), self._lane.after(event):
            kernels = self._kernels()
            step = self._lane.rows_at_once(half.slot_bytes)
            for start in range(0, len(batch), step):
                end = min(start + step, len(batch))
                rows = half.memory[start:end]
                scratch = self._lane.scratch(rows)
                kernels.pack(objects[start:end], blocks[start:end], scratch)
                self._lane.to_arena(scratch, rows)

    def _tabulate(self, batch: Sequence[Item]) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of the objects and of the blocks of ``batch``, int64 ``[n]`` each."""
        return (
            torch.tensor([self._numbers[item.planned.held.id] for item in batch], dtype=torch.int64),
            torch.tensor([item.block_id for item in batch], dtype=torch.int64),
        )

    def _kernels(self) -> Kernels:
        """The kernels, compiled by the thread that needs them first: the engine's own never waits for a compiler."""
        with self._making:
            if self._made is None:
                self._made = kernels_for(self._plan.layers, [planned.runs for planned in self._plan.objects])
            return self._made

    def _send_direct(self, job: SaveJob, items: Sequence[Item], event: Any) -> None:
        if not items:
            return
        with self._lane.after(event):
            pass
        # Worked out before the first one goes: the last one releases the blocks, an error would do so at once.
        work = [_Sending(batch, _direct_segments(batch), job.epoch, None, None) for batch in _batches(items)]
        work[-1].after = lambda: self._completions.save_released(job.job_id)
        for sending in work:
            self._send(sending)

    def _void(self, epoch: int) -> bool:
        return epoch < self.epoch

    def _put_loop(self) -> None:
        while (work := self._sending.get()) is not None:
            if not isinstance(work, _Sending):
                work()
                self._ended()
                continue
            try:
                self._put(work)
            except Exception:
                self._rarely.exception("a save was given up, its blocks will be a miss: please report it")
                self._count_given_up("put", len(work.items), counters.RAISED)
                self._completions.save_failed({item.block_hash for item in work.items})
            finally:
                if work.half is not None:
                    self._arena.send.give_back(work.half)
                if work.after is not None:
                    work.after()
                self._ended()

    def _put(self, work: _Sending) -> None:
        store = self._store()
        if self._void(work.epoch):
            return
        if store is None:
            self._count_given_up("put", len(work.items), counters.NO_CLIENT)
            self._completions.save_failed({item.block_hash for item in work.items})
            return
        names = [self._key(item) for item in work.items]
        groups = [keys.group_id(self._namespace, item.block_hash) for item in work.items]
        results = store.put_many(names, work.segments, groups)
        if self._void(work.epoch):
            store.remove_many(names)
            return
        failed = {item.block_hash for item, code in zip(work.items, results, strict=True) if code != 0}
        stored = [item.planned.held.size for item, code in zip(work.items, results, strict=True) if code == 0]
        self._count("saved_objects", len(stored))
        self._count("saved_bytes", sum(stored))
        self._count("segments:put", sum(map(len, work.segments)))
        self._count_failed("put", [code for code in results if code != 0])
        if failed:
            self._completions.save_failed(failed)

    # Loading.

    def _get_loop(self) -> None:
        while (work := self._loads.get()) is not None:
            plan, asked_at, event = work
            good, unread = 0, set[bytes]()
            try:
                with self._lane.after(event):
                    pass
                if time.monotonic() - asked_at <= TURN_SECONDS:
                    good, unread = self._load(plan)
                else:
                    self._count_given_up("get", len(plan.block_ids) * len(self._plan.objects), counters.OVERDUE)
            except Exception:
                self._rarely.exception("a load was given up, its blocks are computed: please report it")
                self._count_given_up("get", len(plan.block_ids) * len(self._plan.objects), counters.RAISED)
            finally:
                bad = plan.block_ids[good:]
                self._completions.load_finished(plan.generation, bad, unread)
                self._ended()

    def _load(self, plan: LoadPlan) -> tuple[int, set[bytes]]:
        """Load blocks in prefix order up to the first bad one; none when the cache is reset meanwhile.

        Returns:
            the number of leading blocks that are proven, and the hashes of blocks that could not be read.
        """
        items = [
            Item(i, h, b, planned)
            for i, (h, b) in enumerate(zip(plan.block_hashes, plan.block_ids, strict=True))
            for planned in self._plan.objects
        ]
        total = len(plan.block_ids)
        if not items:
            return total, set()
        store = self._store()
        if store is None:
            self._count_given_up("get", len(items), counters.NO_CLIENT)
            return 0, set(plan.block_hashes)
        good, unread, unpacking = total, set[int](), list[Future[None]]()
        try:
            for batch in _batches(items, self._arena.receive.slots):
                unread = self._get(store, batch, unpacking)
                if unread:
                    good = min(unread)
                if unread or self._void(plan.epoch):
                    break
        finally:
            wait(unpacking)  # until then the cache is written to
        for unpacked in unpacking:
            unpacked.result()
        if self._void(plan.epoch):
            return 0, set()
        self._count("loaded_blocks", good)
        return good, {plan.block_hashes[position] for position in unread}

    def _get(self, store: ObjectStore, batch: Sequence[Item], unpacking: list[Future[None]]) -> set[int]:
        """Read a batch and hand what must be unpacked to the other threads, while the next batch is read.

        Args:
            store: the client.
            batch: what to read.
            unpacking: what is being unpacked; one more is added when the batch has packed objects.

        Returns:
            the positions of blocks with an object that did not arrive.
        """
        packed = sum(not item.planned.pieces for item in batch)
        half = self._arena.receive.borrow(packed) if packed else None
        try:
            order = sorted(batch, key=lambda item: (bool(item.planned.pieces), item.planned.held.id))
            direct = iter(_direct_segments([item for item in order if item.planned.pieces]))
            segments = [
                next(direct) if item.planned.pieces else [(_slot_address(half, slot), self._stored_bytes(item))]
                for slot, item in enumerate(order)
            ]
            results = store.get_many([self._key(item) for item in order], segments)
            if half is not None and self._plan.seal_bytes:
                results = self._prove(store, order, results, half)
            arrived = [code == self._stored_bytes(item) for item, code in zip(order, results, strict=True)]
            bad = {item.position for item, ok in zip(order, arrived, strict=True) if not ok}
            self._count("segments:get", sum(map(len, segments)))
            self._count_failed("get", [code for code, ok in zip(results, arrived, strict=True) if not ok])
            self._count("loaded_objects", arrived.count(True))
            self._count("loaded_bytes", sum(i.planned.held.size for i, ok in zip(order, arrived, strict=True) if ok))
            first_bad = min(bad, default=None)
            if half is not None:
                unpacking.append(Future())
                self._unpacks.put(_Unpacking(order, arrived, first_bad, half, unpacking[-1]))
                half = None  # theirs now
            return bad
        finally:
            if half is not None:
                self._arena.receive.give_back(half)

    def _unpack_loop(self) -> None:
        while (work := self._unpacks.get()) is not None:
            error: Exception | None = None
            try:
                self._scatter(work.order, work.arrived, work.first_bad, work.half)
            except Exception as raised:  # the load's own thread says it
                error = raised
            self._arena.receive.give_back(work.half)
            if error is None:
                work.done.set_result(None)
            else:
                work.done.set_exception(error)

    def _prove(self, store: ObjectStore, order: Sequence[Item], results: Sequence[int], half: Half) -> list[int]:
        """Results of a GET in which an object whose digest does not fit has failed, and has been removed.

        A PUT leaves an existing key as it is, so what stayed in the store would be found and fail for ever.
        """
        proven = list(results)
        torn: list[str] = []
        for slot, item in enumerate(order):
            if proven[slot] != self._stored_bytes(item):
                continue
            key = self._key(item)
            if not sealed(key, half.memory[slot], item.planned.held.size):
                proven[slot] = codes.CHECKSUM_MISMATCH
                torn.append(key)
        if torn:
            logger.warning(
                "%d objects hold other bytes than were saved and are removed, the first is %s", len(torn), torn[0]
            )
            store.remove_many(torn)
        return proven

    def _stored_bytes(self, item: Item) -> int:
        """Bytes of an object in the store."""
        return item.planned.held.size + self._plan.seal_bytes

    def _scatter(self, order: Sequence[Item], arrived: Sequence[bool], first_bad: int | None, half: Half) -> None:
        """Unpack what arrived, each object from its own slot, up to the first bad block."""
        packed = [item for item in order if not item.planned.pieces]
        chosen = [
            slot
            for slot, item in enumerate(packed)
            if arrived[slot] and (first_bad is None or item.position < first_bad)
        ]
        objects, blocks = self._tabulate([packed[slot] for slot in chosen])
        slots = torch.tensor(chosen, dtype=torch.int64)
        with torch.inference_mode(), self._lane.after(None):
            step = self._lane.rows_at_once(half.slot_bytes)
            for start in range(0, len(packed), step):
                inside = (slots >= start) & (slots < start + step)
                if not bool(inside.any()):
                    continue
                rows = half.memory[start : min(start + step, len(packed))]
                scratch = self._lane.scratch(rows)
                self._lane.from_arena(rows, scratch)
                self._kernels().unpack(objects[inside], blocks[inside], scratch, slots[inside] - start)

    def _count_failed(self, operation: str, results: Sequence[int]) -> None:
        """Count keys that failed by the store's name of their code; a byte count is one of another object."""
        for code, number in Counter(results).items():
            name = counters.SHORT_READ if code >= 0 else codes.explain(code).name
            self._count_given_up(operation, number, name)

    def _count_given_up(self, operation: str, keys_: int, reason: str) -> None:
        self._count(f"failed_keys:{operation}:{reason}", keys_)

    def _key(self, item: Item) -> str:
        id_ = item.planned.held.id
        return keys.object_key(self._namespace, item.block_hash, id_.kind, id_.shard, id_.stage)


def _slot_address(half: Half | None, slot: int) -> int:
    if half is None:
        raise RuntimeError("the staging arena is closed")
    return half.address(slot)


def _direct_segments(batch: Sequence[Item]) -> list[list[tuple[int, int]]]:
    out: list[list[tuple[int, int]]] = []
    for item in batch:
        out.extend(item.planned.segments(np.array([item.block_id], dtype=np.int64)))
    return out


def _batches(items: Sequence[Item], slots: int = OBJECTS_PER_CALL) -> list[list[Item]]:
    """Cut items, in order, into calls that respect the limits on objects, segments and slots."""
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
