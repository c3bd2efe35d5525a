"""Completions: exactly one finish report per rank and load, and what the ranks have to say about saves.

Pure bookkeeping behind one lock: transfer threads write, the engine's step drains. Nothing is reported twice, and
what was drained by one step never shows up in the next.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Drained:
    """What one step reports.

    Attributes:
        finished_loads: requests whose load is over on this rank, whatever its result.
        bad_block_ids: cache blocks that were not proven loaded.
        unread: hashes of the blocks that were not loaded.
        released: save jobs whose source blocks are no longer needed.
        unsaved: hashes of blocks that did not reach the store.
    """

    finished_loads: set[str] = field(default_factory=set)
    bad_block_ids: set[int] = field(default_factory=set)
    unread: set[bytes] = field(default_factory=set)
    released: list[int] = field(default_factory=list)
    unsaved: set[bytes] = field(default_factory=set)


class Completions:
    """Collects results from the transfer threads until the next step takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Drained()
        self._open_loads: dict[int, str] = {}
        self._open_saves: set[int] = set()

    def load_started(self, generation: int, request_id: str) -> bool:
        """Register a load plan; False when this generation was registered before."""
        with self._lock:
            if generation in self._open_loads:
                return False
            self._open_loads[generation] = request_id
            return True

    def load_finished(self, generation: int, bad_block_ids: Iterable[int], unread: Iterable[bytes]) -> None:
        """A load is over: its bad blocks and its finish report become visible together, and only once."""
        with self._lock:
            request_id = self._open_loads.pop(generation, None)
            if request_id is None:
                return
            self._now.bad_block_ids.update(bad_block_ids)
            self._now.unread.update(unread)
            self._now.finished_loads.add(request_id)

    def save_started(self, job_id: int) -> None:
        """Register a save job."""
        with self._lock:
            self._open_saves.add(job_id)

    def save_released(self, job_id: int) -> None:
        """The job's source blocks are no longer needed; reported once."""
        with self._lock:
            if job_id in self._open_saves:
                self._open_saves.discard(job_id)
                self._now.released.append(job_id)

    def save_failed(self, hashes: Iterable[bytes]) -> None:
        """At least one object of these blocks did not reach the store."""
        with self._lock:
            self._now.unsaved.update(hashes)

    def drain_loads(self) -> tuple[set[str], set[int]]:
        """Take the finished requests and the bad blocks."""
        with self._lock:
            finished, bad = self._now.finished_loads, self._now.bad_block_ids
            self._now.finished_loads, self._now.bad_block_ids = set(), set()
            return finished, bad

    def drain_rest(self) -> tuple[list[int], set[bytes], set[bytes]]:
        """Take released jobs, unsaved hashes and unread hashes."""
        with self._lock:
            rest = self._now.released, self._now.unsaved, self._now.unread
            self._now.released, self._now.unsaved, self._now.unread = [], set(), set()
            return rest

    @property
    def open_loads(self) -> int:
        """Loads that have not finished."""
        with self._lock:
            return len(self._open_loads)
