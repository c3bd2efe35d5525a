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
        settled: resets that a rank has carried out completely, with the number of ranks that say so.
        landed: save jobs for all of whose objects the store has answered, with the number of ranks that say so; only
            while events are published.
    """

    facts: Mapping[int, str] = field(default_factory=dict)
    released: Mapping[int, int] = field(default_factory=dict)
    unsaved: frozenset[bytes] = frozenset()
    unread: frozenset[bytes] = frozenset()
    settled: Mapping[int, int] = field(default_factory=dict)
    landed: Mapping[int, int] = field(default_factory=dict)

    def merge(self, other: "Report") -> "Report":
        """Both reports in one."""
        return Report(
            {**self.facts, **other.facts},
            _added(self.released, other.released),
            self.unsaved | other.unsaved,
            self.unread | other.unread,
            _added(self.settled, other.settled),
            _added(self.landed, other.landed),
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say."""
        return self == Report()


def _added(first: Mapping[int, int], second: Mapping[int, int]) -> dict[int, int]:
    return {number: first.get(number, 0) + second.get(number, 0) for number in first.keys() | second.keys()}
