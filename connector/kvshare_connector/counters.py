"""Counters: what the connector counts, under which names, and the thread-safe place where one process collects it.

Plain numbers by name, no engine and no metrics library: ``stats`` carries them to vLLM's metrics. The three tables here
are the only list of them: metric names, help texts and the reference documentation come from it. A counter with labels
is counted under ``name:value:value``, the values in the order of the table.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

#: Counter name -> (labels, help). The metric is ``kvshare_<name>_total``.
COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "asked_tokens": ((), "Tokens of requests that the engine did not have itself and asked us for."),
    "found_tokens": ((), "Tokens of them that lookups found and the engine planned to load."),
    "hit_tokens": ((), "Tokens of them that all ranks have proven to be loaded."),
    "skipped_requests": (
        ("reason",), "Requests that never use the shared cache: `lora`, `media_identifier` or `streamed_input`.",
    ),
    "lookups": ((), "Lookups asked of the store."),
    "lookups_skipped": ((), "Lookups not asked and counted as a miss, because the store is away or hangs."),
    "lookup_keys": (("kind",), "Keys asked for by lookups, by the kind of cache: `full`, or `window` with its tokens."),
    "lookup_timeouts": ((), "Lookups that took too long and counted as a miss."),
    "lookup_seconds": ((), "Seconds that lookups spent in the store, in the background."),
    "failed_lookups": (("code",), "Calls of lookups that the store answered with a code, a miss."),
    "scheduler_seconds": ((), "Seconds that the engine's scheduler thread spent in the connector."),
    "blocked_microseconds": (
        ("process", "hook"),
        "Microseconds that a thread of the engine spent in a call of the connector, over all ranks.",
    ),
    "hook_calls": (("process", "hook"), "Calls of the connector by the engine, over all ranks."),
    "loaded_blocks": ((), "Blocks that were loaded, per rank."),
    "loaded_objects": ((), "Objects read from the store, over all ranks."),
    "loaded_bytes": ((), "Bytes read from the store, over all ranks."),
    "saved_objects": ((), "Objects that were stored."),
    "saved_bytes": ((), "Bytes of objects that were stored."),
    "failed_loads": ((), "Requests whose load was incomplete; the rest was computed."),
    "dropped_save_blocks": (
        (), "Blocks that were not saved because too many were pinned: the arena or the store was full or too slow.",
    ),
    "failed_keys": (("operation", "code"), "Keys that were not transferred, by the store's code or our own reason."),
    "segments": (("operation",), "Memory segments handed to the store."),
    "arena_waits": (("direction",), "Times that a transfer waited because the whole arena was in use."),
    "arena_wait_seconds": (("direction",), "Seconds of these waits."),
    "removed_objects": ((), "Objects that resets of this engine have removed."),
}  # fmt: skip

#: Gauge name -> help. The metric is ``kvshare_<name>``: of the rank with the largest value.
GAUGES: dict[str, str] = {
    "arena_bytes": "Bytes of the staging arena of a rank.",
    "arena_used_bytes": "Bytes of the arena that hold objects on their way; of the fullest rank.",
    "arena_high_water_bytes": "Most bytes of the arena that were in use at a time; of the fullest rank.",
    "segments_per_object": "Memory segments of the most scattered object of a block; 1 for packed objects.",
    "objects_per_block": "Objects of a block that a rank holds.",
    "pinned_blocks": "Cache blocks that are kept from reuse until they have been saved.",
}  # fmt: skip

#: Histogram name -> (upper bounds, help). The metric is ``kvshare_<name>``.
HISTOGRAMS: dict[str, tuple[tuple[int, ...], str]] = {
    "keys_per_lookup": ((1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144), "Keys asked for by one lookup."),
}

#: Labels of the metric that says what a member does.
MEMBER_LABELS = ("verdict", "reason", "fingerprint", "store_tp", "layouts", "namespace")

#: Our own reasons in the label ``code``, besides the store's names.
SHORT_READ, NO_CLIENT, OVERDUE, RAISED = "SHORT_READ", "NO_CLIENT", "OVERDUE", "RAISED"

#: Most values of one histogram that wait for the next report; what comes on top of them is counted, not distributed.
MOST_SAMPLES = 4096


class Counters:
    """Thread-safe numbers of one process.

    Args:
        source: name of the process among those of the engine, which keeps their gauges apart.
        heard: is told every addition.
    """

    def __init__(self, source: str = "scheduler", *, heard: Callable[[str, float], None] = lambda *_: None) -> None:
        self._source, self._heard = source, heard
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._new_gauges: set[str] = set()
        self._samples: dict[str, list[float]] = {}

    def add(self, name: str, value: float = 1) -> None:
        """Add to a counter of ``COUNTERS``, with its labels' values behind the name."""
        with self._lock:
            self._values[name] += value  # type: ignore[assignment]
        self._heard(name, value)

    def set(self, name: str, value: float) -> None:
        """Set a gauge of ``GAUGES``."""
        with self._lock:
            if self._gauges.get(name) != value:
                self._gauges[name] = value
                self._new_gauges.add(name)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram of ``HISTOGRAMS``."""
        with self._lock:
            values = self._samples.setdefault(name, [])
            if len(values) < MOST_SAMPLES:
                values.append(value)

    def blocked(self, process: str, hook: str, seconds: float) -> None:
        """A call of the engine's thread has ended."""
        with self._lock:
            self._values[f"blocked_microseconds:{process}:{hook}"] += seconds * 1e6  # type: ignore[assignment]
            self._values[f"hook_calls:{process}:{hook}"] += 1
            if process == "scheduler":
                self._values["scheduler_seconds"] += seconds  # type: ignore[assignment]

    @property
    def urgent(self) -> bool:
        """Whether there is more to say than how long calls took."""
        with self._lock:
            if self._new_gauges or self._samples:
                return True
            return any(not name.startswith(("blocked_microseconds:", "hook_calls:")) for name in self._values)

    def drain(self) -> dict[str, float]:
        """Take the counters since the last call."""
        with self._lock:
            values, self._values = self._values, Counter()
        return {name: value for name, value in values.items() if value}

    def take(self) -> dict[str, Any]:
        """Take everything since the last call, in the form of ``stats.KVShareStats.data``."""
        counters = self.drain()
        with self._lock:
            samples, self._samples = self._samples, {}
            gauges = {name: {self._source: self._gauges[name]} for name in sorted(self._new_gauges)}
            self._new_gauges = set()
        return {"counters": counters, "gauges": gauges, "samples": samples}
