"""Wire: what travels between the scheduler process and the ranks, each message with its rule for merging.

Plain picklable values, no engine types: ``connector`` wraps them into the engine's message classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvshare_connector.scheduler.loads import LoadPlan
from kvshare_connector.scheduler.saves import SaveJob
from kvshare_layout import Decision


@dataclass(frozen=True)
class Step:
    """Scheduler to ranks, once per step.

    Attributes:
        decision: what the engine does; only in the step after it was made.
        epoch: number of resets so far; jobs of earlier epochs are void.
        loads: plans to start.
        saves: jobs to start after this step's forward pass.
    """

    decision: Decision | None = None
    epoch: int = 0
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SaveJob, ...] = ()


@dataclass(frozen=True)
class Report:
    """Ranks to scheduler. Merging adds: counts add up, sets and mappings unite.

    Attributes:
        facts: JSON of ``RankFacts`` by rank, until the scheduler has decided.
        released: save jobs whose source blocks are no longer needed, with the number of ranks that say so.
        unsaved: hashes of blocks of which at least one object did not reach the store.
        unread: hashes of blocks of which at least one object could not be read.
    """

    facts: Mapping[int, str] = field(default_factory=dict)
    released: Mapping[int, int] = field(default_factory=dict)
    unsaved: frozenset[bytes] = frozenset()
    unread: frozenset[bytes] = frozenset()

    def merge(self, other: "Report") -> "Report":
        """Both reports in one."""
        released = dict(self.released)
        for job_id, ranks in other.released.items():
            released[job_id] = released.get(job_id, 0) + ranks
        return Report({**self.facts, **other.facts}, released, self.unsaved | other.unsaved, self.unread | other.unread)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (self.facts or self.released or self.unsaved or self.unread)
