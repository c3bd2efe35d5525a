"""Completions: exactly one finish report per rank and load, and what the ranks have to say about saves.

Pure bookkeeping behind one lock: transfer threads write, the engine's step drains. Nothing is reported twice, and
what was drained by one step never shows up in the next.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvshare_connector.scheduler.loads import LoadPlan


@dataclass
class Drained:
    """What a rank has to say about saves and missing blocks.

    Attributes:
        released: save jobs whose source blocks are no longer needed.
        unsaved: hashes of blocks that did not reach the store.
        unread: hashes of blocks that could not be read.
        settled: resets after which every older job has landed or been given up.
        landed: save jobs for all of whose objects the store has answered.
    """

    released: list[int] = field(default_factory=list)
    unsaved: set[bytes] = field(default_factory=set)
    unread: set[bytes] = field(default_factory=set)
    settled: list[int] = field(default_factory=list)
    landed: list[int] = field(default_factory=list)


class Completions:
    """Collects results from the transfer threads until the next step takes them.

    Args:
        tell_landed: whether anybody wants to know which saves have landed.
    """

    def __init__(self, *, tell_landed: bool = False) -> None:
        self._tell_landed = tell_landed
        self._lock = threading.Lock()
        self._now = Drained()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_block_ids: set[int] = set()
        self._open_loads: dict[int, str] = {}
        self._open_saves: set[int] = set()

    def load_started(self, generation: int, request_id: str) -> bool:
        """Register a load plan; False when this generation was registered before."""
        with self._lock:
            if generation in self._open_loads:
                return False
            self._open_loads[generation] = request_id
            return True

    def load_over(self, plan: LoadPlan, good: int, unread: Iterable[bytes]) -> None:
        """A load is over, of which the first ``good`` blocks are proven.

        What is not proven is told by block, or by request where only the whole load would be right; a load of several
        cache groups is never told by block, which the engine could not understand.
        """
        bad = () if plan.whole else plan.block_ids[good:]
        self.load_finished(plan.generation, bad, unread, failed=plan.whole and good < plan.length)

    def load_finished(
        self, generation: int, bad_block_ids: Iterable[int], unread: Iterable[bytes], *, failed: bool = False
    ) -> None:
        """A load is over: what is bad and its finish report become visible together, and only once."""
        with self._lock:
            request_id = self._open_loads.pop(generation, None)
            if request_id is None:
                return
            self._bad_block_ids.update(bad_block_ids)
            self._now.unread.update(unread)
            self._finished.add(request_id)
            if failed:
                self._failed.add(request_id)

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

    def save_landed(self, job_id: int) -> None:
        """The store has answered for all objects of the job; what failed has been told before."""
        if self._tell_landed:
            with self._lock:
                self._now.landed.append(job_id)

    def save_failed(self, hashes: Iterable[bytes]) -> None:
        """At least one object of these blocks did not reach the store."""
        with self._lock:
            self._now.unsaved.update(hashes)

    def settled(self, epoch: int) -> None:
        """Every job from before the reset ``epoch`` has landed or been given up."""
        with self._lock:
            self._now.settled.append(epoch)

    def drain_loads(self) -> tuple[set[str], set[str], set[int]]:
        """Take the requests whose load is over, those of them that failed as a whole, and bad blocks of the others."""
        with self._lock:
            taken = self._finished, self._failed, self._bad_block_ids
            self._finished, self._failed, self._bad_block_ids = set(), set(), set()
            return taken

    def drain_rest(self) -> Drained:
        """Take everything else."""
        with self._lock:
            taken, self._now = self._now, Drained()
            return taken

    @property
    def open_loads(self) -> int:
        """Loads that have not finished."""
        with self._lock:
            return len(self._open_loads)

    @property
    def waiting(self) -> bool:
        """Whether something has not been taken by a step yet."""
        with self._lock:
            return bool(self._finished or self._failed or self._bad_block_ids) or self._now != Drained()
