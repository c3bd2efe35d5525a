"""Resets: from emptying the cache to the moment when no old key can come back.

Pure apart from one lock. A reset removes the keys at once, and again after every rank has said that all older jobs
have landed; until both removals have worked, nothing may be looked up.
"""

import threading


class Resets:
    """Progress of the newest reset.

    Args:
        ranks: ranks that must settle.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._epoch = 0
        self._settled = 0
        self._waits = False
        self._removals = 0
        self._open: set[int] = set()

    def begin(self, epoch: int) -> None:
        """A reset has begun; an earlier one that is not over is covered by it."""
        with self._lock:
            self._epoch, self._settled, self._waits = epoch, 0, True

    def settled(self, epoch: int, ranks: int) -> bool:
        """``ranks`` more ranks have settled ``epoch``; True when they were the last ones."""
        with self._lock:
            if epoch != self._epoch or not self._waits:
                return False
            self._settled += ranks
            if self._settled < self._ranks:
                return False
            self._waits = False
            return True

    def removal_started(self) -> int:
        """Number of a removal that has been asked for."""
        with self._lock:
            self._removals += 1
            self._open.add(self._removals)
            return self._removals

    def removed(self, number: int) -> None:
        """A removal has worked."""
        with self._lock:
            self._open.discard(number)

    @property
    def waits_for_ranks(self) -> bool:
        """Whether the engine must step, so that the ranks hear of the reset and answer."""
        with self._lock:
            return self._waits

    @property
    def under_way(self) -> bool:
        """Whether an old key might still be there."""
        with self._lock:
            return self._waits or bool(self._open)
