"""Pins: which cache blocks must not be reused until the ranks have read them.

Pure ledger; blocks are touched and released through injected callables. The budget keeps a slow store from taking
blocks away from serving: over it, a save is dropped before anything is pinned.
"""

from collections.abc import Callable, Sequence


class Pins:
    """Pins of one engine.

    Args:
        budget: largest number of blocks pinned at a time.
        ranks: ranks that must report a job before its blocks are released.
        touch: takes one reference on each block.
        release: gives the references back.
    """

    def __init__(
        self,
        budget: int,
        ranks: int,
        touch: Callable[[Sequence[int]], None],
        release: Callable[[Sequence[int]], None],
    ) -> None:
        self._budget, self._ranks, self._touch, self._release = budget, ranks, touch, release
        self._jobs: dict[int, tuple[tuple[int, ...], int]] = {}
        self._blocks = 0

    @property
    def room(self) -> int:
        """How many more blocks fit into the budget."""
        return max(0, self._budget - self._blocks)

    def pin(self, job_id: int, block_ids: Sequence[int]) -> None:
        """Pin the blocks of a job. The caller has asked for ``room``."""
        self._touch(block_ids)
        self._jobs[job_id] = (tuple(block_ids), self._ranks)
        self._blocks += len(block_ids)

    def reported(self, job_id: int, ranks: int) -> None:
        """``ranks`` more ranks need the blocks of a job no longer; unknown jobs are ignored."""
        entry = self._jobs.pop(job_id, None)
        if entry is None:
            return
        block_ids, waiting = entry
        if waiting > ranks:
            self._jobs[job_id] = (block_ids, waiting - ranks)
            return
        self._blocks -= len(block_ids)
        self._release(block_ids)

    @property
    def blocks(self) -> int:
        """Blocks pinned now."""
        return self._blocks

    @property
    def jobs(self) -> int:
        """Jobs whose blocks are pinned."""
        return len(self._jobs)
