"""Transfer: moves a rank's blocks between its caches and the store, in threads of its own.

Imports neither vLLM nor Mooncake, nor does anything behind it: it works on a plan, an arena and any ``ObjectStore``.
"""

import time

from kvshare_connector.scheduler.loads import LoadPlan
from kvshare_connector.scheduler.saves import SaveJob
from kvshare_connector.worker.loading import Loading
from kvshare_connector.worker.rank import Rank
from kvshare_connector.worker.saving import Saving

#: Seconds that closing waits for calls that hang.
CLOSE_SECONDS = 2.0


class Transfers:
    """What the engine's thread calls; nothing but ``close`` waits.

    Attributes:
        rank: what is moved, and between what.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank, self._underway = rank, rank.underway
        self._saving, self._loading = Saving(rank), Loading(rank)

    def load(self, plan: LoadPlan) -> None:
        """Start a load, behind everything that the device still does with these blocks for earlier owners."""
        if self.rank.completions.load_started(plan.generation, plan.request_id):
            self._loading.add(plan, self.rank.lane.record())

    def save(self, job: SaveJob) -> None:
        """Start a save of blocks whose values are in the cache once the device has come this far."""
        self.rank.completions.save_started(job.job_id)
        self._saving.add(job, self.rank.lane.record())

    def new_epoch(self, epoch: int) -> None:
        """The cache was reset: open jobs are void, and the epoch is reported once the last of them has landed."""
        self._underway.epoch = epoch
        self._saving.add(epoch)

    @property
    def open(self) -> bool:
        """Whether any job, batch or epoch is still under way."""
        return self._underway.any

    def close(self) -> None:
        """Stop; what is under way in the store is left to itself."""
        self._saving.close()
        self._loading.close()
        self.rank.arena.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in (*self._saving.threads, *self._loading.threads):
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._loading.close_unpacking()
