"""Rank: what saving and loading share: the plan, the device, the store, where results go, and what is under way."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvshare_connector import counters
from kvshare_connector.store import codes
from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.worker.arena import Arena
from kvshare_connector.worker.completions import Completions
from kvshare_connector.worker.device import Lane
from kvshare_connector.worker.items import Item
from kvshare_connector.worker.plan import RankPlan
from kvshare_connector.worker.repacking import Repacking
from kvshare_layout import keys

Count = Callable[[str, float], None]


class Underway:
    """How much of a rank's work is under way, and of which reset of the cache it is; shared by all its threads.

    Attributes:
        epoch: number of resets so far.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._open, self._lock = 0, threading.Lock()

    @property
    def any(self) -> bool:
        """Whether any job, batch or epoch is still under way."""
        with self._lock:
            return self._open > 0

    def begun(self) -> None:
        """One more piece of work."""
        with self._lock:
            self._open += 1

    def ended(self) -> None:
        """One piece of work is over, however it went."""
        with self._lock:
            self._open -= 1

    def void(self, epoch: int) -> bool:
        """Whether the cache was reset since ``epoch``."""
        return epoch < self.epoch


@dataclass(frozen=True)
class Rank:
    """One rank's parts.

    Attributes:
        namespace: prefix of all keys.
        plan: the rank's objects.
        arena: staging memory, cut for the plan.
        lane: the device.
        store: returns the client, or None while there is none.
        completions: where results go.
        count: adds to a counter by name.
        underway: what is not over yet.
        repacking: moves blocks between the cache and staging memory.
    """

    namespace: str
    plan: RankPlan
    arena: Arena
    lane: Lane
    store: Callable[[], ObjectStore | None]
    completions: Completions
    count: Count
    underway: Underway = field(default_factory=Underway)
    repacking: Repacking = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "repacking", Repacking(self.plan, self.lane))

    def key(self, item: Item) -> str:
        """Name of an object in the store."""
        id_ = item.planned.held.id
        return keys.object_key(self.namespace, item.block_hash, id_.kind, id_.shard, id_.stage)

    def stored_bytes(self, item: Item) -> int:
        """Bytes of an object in the store."""
        return item.planned.held.size + self.plan.seal_bytes

    def count_failed(self, operation: str, results: Sequence[int]) -> None:
        """Count keys that failed by the store's name of their code; a byte count is one of another object."""
        for code, number in Counter(results).items():
            name = counters.SHORT_READ if code >= 0 else codes.explain(code).name
            self.count_given_up(operation, number, name)

    def count_given_up(self, operation: str, keys_: int, reason: str) -> None:
        """Count keys that were not moved, by our own reason."""
        self.count(f"failed_keys:{operation}:{reason}", keys_)
