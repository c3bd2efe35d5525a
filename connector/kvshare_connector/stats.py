"""Stats: what the connector counts, and how it reaches vLLM's metrics.

Counters are plain numbers by name; merging adds. ``TABLE`` is the only list of them: metric names, help texts and the
reference documentation come from it.
"""

import threading
from collections import Counter
from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

#: Counter name -> (labels, help). The metric is ``kvshare_<name>_total``.
TABLE: dict[str, tuple[dict[str, str], str]] = {
    "lookups": ({}, "Lookups asked of the store."),
    "lookups_skipped": ({}, "Lookups not asked and counted as a miss, because the store is away or hangs."),
    "lookup_keys": ({}, "Keys asked for by lookups."),
    "lookup_timeouts": ({}, "Lookups that took too long and counted as a miss."),
    "lookup_seconds": ({}, "Seconds that lookups spent in the store, in the background."),
    "scheduler_seconds": ({}, "Seconds that the engine's scheduler thread spent in the connector."),
    "loaded_blocks": ({}, "Blocks that were loaded, per rank."),
    "loaded_bytes": ({}, "Bytes read from the store, per rank."),
    "saved_objects": ({}, "Objects that were stored."),
    "saved_bytes": ({}, "Bytes of objects that were stored."),
    "failed_loads": ({}, "Requests whose load was incomplete; the rest was computed."),
    "dropped_save_blocks": ({}, "Blocks that were not saved because too many were pinned already."),
    "failed_get_keys": ({"operation": "get"}, "Keys whose transfer failed."),
    "failed_put_keys": ({"operation": "put"}, "Keys whose transfer failed."),
    "get_segments": ({"operation": "get"}, "Memory segments handed to the store."),
    "put_segments": ({"operation": "put"}, "Memory segments handed to the store."),
}

#: Counters that share one metric with a label.
SHARED_METRICS = {
    "failed_get_keys": "failed_keys", "failed_put_keys": "failed_keys",
    "get_segments": "segments", "put_segments": "segments",
}  # fmt: skip

#: Labels of the metric that says what a member does.
MEMBER_LABELS = ("verdict", "reason", "fingerprint", "store_tp", "layouts", "namespace")


class Counters:
    """Thread-safe counters of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, value: float = 1) -> None:
        """Add to a counter of ``TABLE``."""
        with self._lock:
            self._values[name] += value  # type: ignore[assignment]

    def drain(self) -> dict[str, float]:
        """Take what was counted since the last call."""
        with self._lock:
            values, self._values = self._values, Counter()
        return {name: value for name, value in values.items() if value}


class KVShareStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: ``counters`` (numbers by name) and ``member`` (labels of ``kvshare_member_info``, or None)."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together: counters add up, the newer member information wins."""
        counters = Counter(self.data.get("counters") or {})
        counters.update(other.data.get("counters") or {})
        member = other.data.get("member") or self.data.get("member")
        return KVShareStats(data={"counters": dict(counters), "member": member})

    def reduce(self) -> dict[str, int | float]:
        """The numbers of an interval, for the engine's log line."""
        counters = self.data.get("counters") or {}
        return {name: round(counters[name], 3) for name in TABLE if name in counters}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.data.get("counters") or self.data.get("member"))


class KVSharePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers ``kvshare_*`` with vLLM's own Prometheus registry."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        metrics: dict[str, Any] = {}
        self._children: dict[tuple[int, str], Any] = {}
        for name, (labels, text) in TABLE.items():
            metric_name = SHARED_METRICS.get(name, name)
            if metric_name not in metrics:
                metrics[metric_name] = metric_types[PromCounter](
                    name=f"kvshare_{metric_name}", documentation=text, labelnames=[*labelnames, *labels]
                )
            for engine, values in labelvalues.items():
                self._children[engine, name] = metrics[metric_name].labels(*values, *labels.values())
        self._info = metric_types[PromGauge](
            name="kvshare_member_info",
            documentation="What this engine does with the shared cache, and why; always 1.",
            labelnames=[*labelnames, *MEMBER_LABELS],
        )
        self._shown: dict[int, list[str]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's numbers."""
        for name, value in (transfer_stats_data.get("counters") or {}).items():
            if (child := self._children.get((engine_idx, name))) is not None:
                child.inc(value)
        member = transfer_stats_data.get("member")
        if member:
            engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
            labels = [*engine, *(str(member.get(label, "")) for label in MEMBER_LABELS)]
            if (old := self._shown.get(engine_idx)) and old != labels:
                self._info.labels(*old).set(0)
            self._info.labels(*labels).set(1)
            self._shown[engine_idx] = labels
