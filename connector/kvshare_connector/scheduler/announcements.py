"""Announcements: which blocks this engine may call stored in KV events, and which no longer.

Pure ledger. A block is announced when every rank has said that its objects of the job have landed, and none that one of
them failed: half a block is worth nothing to a router. It is taken back on a reset, and when a lookup or a load finds
it missing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoredBlock:
    """A block as an event describes it.

    Attributes:
        block_hash: its hash.
        parent: hash of the block before it, or None for the first of a prompt.
        token_ids: its tokens.
        extra_keys: what else went into its hash (salt, media), or None.
    """

    block_hash: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Stored:
    """Consecutive blocks have arrived in the store."""

    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True)
class Removed:
    """Blocks are not in the store any more."""

    block_hashes: tuple[bytes, ...]


@dataclass
class _Job:
    blocks: tuple[StoredBlock, ...]
    waiting: int
    failed: set[bytes]


class Announcements:
    """What the engine has announced, and what is on its way.

    Args:
        ranks: ranks that must say that a job has landed.
        limit: most blocks that are remembered as announced; of older ones the end is not announced.
    """

    def __init__(self, ranks: int, limit: int = 200_000) -> None:
        self._ranks, self._limit = ranks, limit
        self._jobs: dict[int, _Job] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._events: list[Stored | Removed] = []

    def planned(self, job_id: int, blocks: Sequence[StoredBlock]) -> None:
        """A save job has been made."""
        self._jobs[job_id] = _Job(tuple(blocks), self._ranks, set())

    def failed(self, hashes: Iterable[bytes]) -> None:
        """At least one object of these blocks did not reach the store; to be told before ``landed`` of its job."""
        if missing := set(hashes):
            for job in self._jobs.values():
                job.failed |= missing
            self.removed(missing)

    def landed(self, job_id: int, ranks: int) -> None:
        """All objects of ``ranks`` more ranks have been answered for by the store; unknown jobs are ignored."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.waiting -= ranks
        if job.waiting > 0:
            return
        del self._jobs[job_id]
        run: list[StoredBlock] = []
        for block in job.blocks:
            if run and block.parent != run[-1].block_hash:
                self._stored(run)
                run = []
            if block.block_hash not in job.failed:
                run.append(block)
        self._stored(run)

    def _stored(self, run: Sequence[StoredBlock]) -> None:
        if not run:
            return
        self._events.append(Stored(tuple(run)))
        for block in run:
            self._known[block.block_hash] = None
            self._known.move_to_end(block.block_hash)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def removed(self, hashes: Iterable[bytes]) -> None:
        """These blocks are not complete in the store; those that were announced are taken back."""
        gone = tuple(h for h in hashes if h in self._known)
        for block_hash in gone:
            del self._known[block_hash]
        if gone:
            self._events.append(Removed(gone))

    def reset(self) -> None:
        """The cache is being emptied: everything is taken back, and what is on its way will not be announced."""
        self._jobs.clear()
        self.removed(tuple(self._known))

    @property
    def open(self) -> bool:
        """Whether a job has not landed yet, or an event has not been taken."""
        return bool(self._jobs or self._events)

    def take(self) -> list[Stored | Removed]:
        """The events since the last call, in order."""
        taken, self._events = self._events, []
        return taken
