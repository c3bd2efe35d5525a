"""Saving: one thread packs a rank's blocks and one puts them into the store. Every job ends in exactly one report."""

import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare_connector import counters
from kvshare_connector.lines import Rarely
from kvshare_connector.scheduler.saves import SaveJob
from kvshare_connector.worker.arena import Half
from kvshare_connector.worker.items import OBJECTS_PER_CALL, Item, batches, direct_segments, items_of
from kvshare_connector.worker.rank import Rank
from kvshare_connector.worker.seals import seal
from kvshare_layout import keys

logger = logging.getLogger(__name__)


@dataclass
class _Sending:
    """A batch on its way to the store."""

    items: Sequence[Item]
    segments: list[list[tuple[int, int]]]
    epoch: int
    half: Half | None
    after: Callable[[], None] | None


class Saving:
    """Moves a rank's blocks into the store.

    Attributes:
        threads: the two threads; they end some time after ``close``.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank, self._completions = rank, rank.completions
        self._rarely = Rarely(logger)
        self._jobs: queue.SimpleQueue[tuple[SaveJob | int, Any] | None] = queue.SimpleQueue()
        self._sending: queue.SimpleQueue[_Sending | Callable[[], None] | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=target, name=f"kvshare-{name}", daemon=True)
            for name, target in (("pack", self._pack_loop), ("put", self._put_loop))
        ]
        for thread in self.threads:
            thread.start()

    def add(self, work: SaveJob | int, event: Any = None) -> None:
        """One more job, behind ``event`` of the device; or the number of an epoch, to be reported in its turn."""
        self._rank.underway.begun()
        self._jobs.put((work, event))

    def close(self) -> None:
        """Stop; what is under way in the store is left to itself."""
        self._jobs.put(None)
        self._sending.put(None)

    def _send(self, work: "_Sending | Callable[[], None]") -> None:
        self._rank.underway.begun()
        self._sending.put(work)

    def _pack_loop(self) -> None:
        while (work := self._jobs.get()) is not None:
            job, event = work
            if isinstance(job, int):
                self._send(functools.partial(self._completions.settled, job))
                self._rank.underway.ended()
                continue
            mine = items_of(self._rank.plan, job.blocks)
            items = [item for number, item in mine if item.planned.held.writes(number)]
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
                self._rank.underway.ended()

    def _pack(self, job: SaveJob, items: Sequence[Item], event: Any) -> None:
        rank, arena = self._rank, self._rank.arena
        for start in range(0, len(items), step := max(1, min(OBJECTS_PER_CALL, arena.send.slots))):
            batch = sorted(items[start : start + step], key=lambda item: item.planned.held.id)
            if rank.underway.void(job.epoch):
                return
            half = arena.send.borrow(len(batch))
            if half is None:
                raise RuntimeError("the staging arena is closed")
            try:
                rank.repacking.gather(batch, half, event)
                if rank.plan.seal_bytes:
                    for slot, item in enumerate(batch):
                        seal(rank.key(item), half.memory[slot], item.planned.held.size)
            except Exception:
                arena.send.give_back(half)
                raise
            segments = [[(half.address(slot), rank.stored_bytes(item))] for slot, item in enumerate(batch)]
            self._send(_Sending(batch, segments, job.epoch, half, None))

    def _send_direct(self, job: SaveJob, items: Sequence[Item], event: Any) -> None:
        if not items:
            return
        with self._rank.lane.after(event):
            pass
        # Worked out before the first one goes: the last one releases the blocks, an error would do so at once.
        work = [_Sending(batch, direct_segments(batch), job.epoch, None, None) for batch in batches(items)]
        work[-1].after = lambda: self._completions.save_released(job.job_id)
        for sending in work:
            self._send(sending)

    def _put_loop(self) -> None:
        while (work := self._sending.get()) is not None:
            if not isinstance(work, _Sending):
                work()
                self._rank.underway.ended()
                continue
            try:
                self._put(work)
            except Exception:
                self._rarely.exception("a save was given up, its blocks will be a miss: please report it")
                self._rank.count_given_up("put", len(work.items), counters.RAISED)
                self._completions.save_failed({item.block_hash for item in work.items})
            finally:
                if work.half is not None:
                    self._rank.arena.send.give_back(work.half)
                if work.after is not None:
                    work.after()
                self._rank.underway.ended()

    def _put(self, work: _Sending) -> None:
        rank = self._rank
        store = rank.store()
        if rank.underway.void(work.epoch):
            return
        if store is None:
            rank.count_given_up("put", len(work.items), counters.NO_CLIENT)
            self._completions.save_failed({item.block_hash for item in work.items})
            return
        names = [rank.key(item) for item in work.items]
        groups = [keys.group_id(rank.namespace, item.block_hash) for item in work.items]
        results = store.put_many(names, work.segments, groups)
        if rank.underway.void(work.epoch):
            store.remove_many(names)
            return
        failed = {item.block_hash for item, code in zip(work.items, results, strict=True) if code != 0}
        stored = [item.planned.held.size for item, code in zip(work.items, results, strict=True) if code == 0]
        rank.count("saved_objects", len(stored))
        rank.count("saved_bytes", sum(stored))
        rank.count("segments:put", sum(map(len, work.segments)))
        rank.count_failed("put", [code for code in results if code != 0])
        if failed:
            self._completions.save_failed(failed)
