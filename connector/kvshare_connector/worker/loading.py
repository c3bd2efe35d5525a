"""Loading: two threads get a rank's blocks from the store and two put them into the cache.

Every load ends in exactly one report, whatever happens on the way.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from kvshare_connector import counters
from kvshare_connector.lines import Rarely
from kvshare_connector.scheduler.blocks import NOWHERE
from kvshare_connector.scheduler.loads import LoadPlan
from kvshare_connector.store import codes
from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.worker.arena import HALVES, Half
from kvshare_connector.worker.items import Item, batches, direct_segments, items_of
from kvshare_connector.worker.rank import Rank
from kvshare_connector.worker.seals import sealed

logger = logging.getLogger(__name__)

#: Threads that get, and threads that unpack: a batch goes into the cache while the next one comes from the store.
GETTERS = HALVES
#: Seconds that a load may wait for its turn behind calls that hang; half of Mooncake's default lease.
TURN_SECONDS = 5.0


@dataclass(frozen=True)
class _Unpacking:
    """A batch that has been read and is on its way into the cache."""

    order: Sequence[Item]
    arrived: Sequence[bool]
    first_bad: int | None
    half: Half
    done: Future[None]


class Loading:
    """Moves blocks from the store into a rank's cache.

    Attributes:
        threads: those that get; they end some time after ``close``.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._rarely = Rarely(logger)
        self._loads: queue.SimpleQueue[tuple[LoadPlan, float, Any] | None] = queue.SimpleQueue()
        self._unpacks: queue.SimpleQueue[_Unpacking | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._get_loop, name=f"kvshare-get-{number}", daemon=True)
            for number in range(GETTERS)
        ]
        unpackers = [
            threading.Thread(target=self._unpack_loop, name=f"kvshare-unpack-{number}", daemon=True)
            for number in range(GETTERS)
        ]
        for thread in (*self.threads, *unpackers):
            thread.start()

    def add(self, plan: LoadPlan, event: Any) -> None:
        """One more load, behind ``event`` of the device."""
        self._rank.underway.begun()
        self._loads.put((plan, time.monotonic(), event))

    def close(self) -> None:
        """Stop getting; what is under way in the store is left to itself."""
        for _ in range(GETTERS):
            self._loads.put(None)

    def close_unpacking(self) -> None:
        """Stop unpacking; not before the getters: what has been read is unpacked, and nobody waits for it in vain."""
        for _ in range(GETTERS):
            self._unpacks.put(None)

    def _get_loop(self) -> None:
        rank = self._rank
        while (work := self._loads.get()) is not None:
            plan, asked_at, event = work
            good, unread = 0, set[bytes]()
            try:
                with rank.lane.after(event):
                    pass
                if time.monotonic() - asked_at <= TURN_SECONDS:
                    good, unread = self._load(plan)
                else:
                    self._give_up(plan, counters.OVERDUE)
            except Exception:
                self._rarely.exception("a load was given up, its blocks are computed: please report it")
                self._give_up(plan, counters.RAISED)
            finally:
                rank.completions.load_over(plan, good, unread)
                rank.underway.ended()

    def _give_up(self, plan: LoadPlan, reason: str) -> None:
        self._rank.count_given_up("get", sum(1 for _ in items_of(self._rank.plan, plan.blocks)), reason)

    def _load(self, plan: LoadPlan) -> tuple[int, set[bytes]]:
        """Load blocks in prefix order up to the first bad one; none when the cache is reset meanwhile.

        Returns:
            the number of leading blocks that are proven, kind by kind, and the hashes of blocks that could not be read.
        """
        rank = self._rank
        items = [item for _, item in items_of(rank.plan, plan.blocks)]
        if NOWHERE in plan.block_ids:
            raise ValueError(f"a load into a block that request {plan.request_id} does not have")
        good = plan.length
        if not items:
            return good, set()
        store = rank.store()
        if store is None:
            rank.count_given_up("get", len(items), counters.NO_CLIENT)
            return 0, set(plan.block_hashes)
        unread, unpacking = set[int](), list[Future[None]]()
        try:
            for batch in batches(items, rank.arena.receive.slots):
                unread = self._get(store, batch, unpacking)
                if unread:
                    good = min(unread)
                if unread or rank.underway.void(plan.epoch):
                    break
        finally:
            wait(unpacking)  # until then the cache is written to
        for unpacked in unpacking:
            unpacked.result()
        if rank.underway.void(plan.epoch):
            return 0, set()
        if good == plan.length or not plan.whole:
            rank.count("loaded_blocks", min(good, plan.count))
        return good, {item.block_hash for item in items if item.position in unread}

    def _get(self, store: ObjectStore, batch: Sequence[Item], unpacking: list[Future[None]]) -> set[int]:
        """Read a batch and hand what must be unpacked to the other threads, while the next batch is read.

        Args:
            store: the client.
            batch: what to read.
            unpacking: what is being unpacked; one more is added when the batch has packed objects.

        Returns:
            the positions of blocks with an object that did not arrive.
        """
        rank, receive = self._rank, self._rank.arena.receive
        packed = sum(not item.planned.pieces for item in batch)
        half = receive.borrow(packed) if packed else None
        try:
            order = sorted(batch, key=lambda item: (bool(item.planned.pieces), item.planned.held.id))
            direct = iter(direct_segments([item for item in order if item.planned.pieces]))
            segments = [
                next(direct) if item.planned.pieces else [(_slot_address(half, slot), rank.stored_bytes(item))]
                for slot, item in enumerate(order)
            ]
            results = store.get_many([rank.key(item) for item in order], segments)
            if half is not None and rank.plan.seal_bytes:
                results = self._prove(store, order, results, half)
            arrived = [code == rank.stored_bytes(item) for item, code in zip(order, results, strict=True)]
            bad = {item.position for item, ok in zip(order, arrived, strict=True) if not ok}
            rank.count("segments:get", sum(map(len, segments)))
            rank.count_failed("get", [code for code, ok in zip(results, arrived, strict=True) if not ok])
            rank.count("loaded_objects", arrived.count(True))
            rank.count("loaded_bytes", sum(i.planned.held.size for i, ok in zip(order, arrived, strict=True) if ok))
            if half is not None:
                unpacking.append(Future())
                self._unpacks.put(_Unpacking(order, arrived, min(bad, default=None), half, unpacking[-1]))
                half = None  # theirs now
            return bad
        finally:
            if half is not None:
                receive.give_back(half)

    def _prove(self, store: ObjectStore, order: Sequence[Item], results: Sequence[int], half: Half) -> list[int]:
        """Results of a GET in which an object whose digest does not fit has failed, and has been removed.

        A PUT leaves an existing key as it is, so what stayed in the store would be found and fail for ever.
        """
        proven = list(results)
        torn: list[str] = []
        for slot, item in enumerate(order):
            if proven[slot] != self._rank.stored_bytes(item):
                continue
            key = self._rank.key(item)
            if not sealed(key, half.memory[slot], item.planned.held.size):
                proven[slot] = codes.CHECKSUM_MISMATCH
                torn.append(key)
        if torn:
            logger.warning(
                "%d objects hold other bytes than were saved and are removed, the first is %s", len(torn), torn[0]
            )
            store.remove_many(torn)
        return proven

    def _unpack_loop(self) -> None:
        while (work := self._unpacks.get()) is not None:
            error: Exception | None = None
            try:
                self._unpack(work)
            except Exception as raised:  # the load's own thread says it
                error = raised
            self._rank.arena.receive.give_back(work.half)
            if error is None:
                work.done.set_result(None)
            else:
                work.done.set_exception(error)

    def _unpack(self, work: _Unpacking) -> None:
        """Unpack what arrived, each object from its own slot, up to the first bad block."""
        packed = [item for item in work.order if not item.planned.pieces]
        end = work.first_bad
        chosen = [
            slot for slot, item in enumerate(packed) if work.arrived[slot] and (end is None or item.position < end)
        ]
        self._rank.repacking.scatter(packed, chosen, work.half)


def _slot_address(half: Half | None, slot: int) -> int:
    if half is None:
        raise RuntimeError("the staging arena is closed")
    return half.address(slot)
