"""Stats: how what was counted reaches vLLM's metrics, from every rank and the scheduler to one ``/metrics``.

Counters add up over ranks and over time; gauges are kept by rank, the newest value of each; samples are joined. vLLM
tells engines of one process apart by its own labels (``engine``), which come in front of ours.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from prometheus_client import Histogram as PromHistogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvshare_connector.counters import COUNTERS, GAUGES, HISTOGRAMS, MEMBER_LABELS, MOST_SAMPLES


class KVShareStats(KVConnectorStats):  # type: ignore[misc]
    """What some processes of an engine have counted.

    ``data`` survives serialisation. ``counters``: numbers by name; ``gauges``: by name, then by rank; ``samples``:
    values of histograms by name; ``member``: labels of ``kvshare_member_info``, or None.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together; neither is changed."""
        counters = Counter(_part(self.data, "counters"))
        counters.update(_part(other.data, "counters"))
        mine, others = _part(self.data, "gauges"), _part(other.data, "gauges")
        gauges = {name: {**mine.get(name, {}), **others.get(name, {})} for name in {**mine, **others}}
        first, second = _part(self.data, "samples"), _part(other.data, "samples")
        samples = {name: [*first.get(name, ()), *second.get(name, ())][:MOST_SAMPLES] for name in {**first, **second}}
        member = other.data.get("member") or self.data.get("member")
        return KVShareStats(data={"counters": dict(counters), "gauges": gauges, "samples": samples, "member": member})

    def reduce(self) -> dict[str, int | float]:
        """The numbers of an interval, for the engine's log line: labels added up, calls left out."""
        sums: Counter[str] = Counter()
        for name, value in _part(self.data, "counters").items():
            sums[name.split(":")[0]] += value
        shown: dict[str, int | float] = {
            name: round(sums[name], 3) for name in COUNTERS if name in sums and name != "hook_calls"
        }
        for name, by_rank in _part(self.data, "gauges").items():
            if name in GAUGES and by_rank:
                shown[name] = max(by_rank.values())
        return shown

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return data.get(name) or {}


class KVSharePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers ``kvshare_*`` with vLLM's own Prometheus registry, for one or several engines."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters = {
            name: metric_types[PromCounter](
                name=f"kvshare_{name}", documentation=text, labelnames=[*labelnames, *labels]
            )
            for name, (labels, text) in COUNTERS.items()
        }
        self._gauges = {
            name: metric_types[PromGauge](
                name=f"kvshare_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in GAUGES.items()
        }
        self._histograms = {
            name: metric_types[PromHistogram](
                name=f"kvshare_{name}", documentation=text, labelnames=labelnames, buckets=list(bounds)
            )
            for name, (bounds, text) in HISTOGRAMS.items()
        }
        self._info = metric_types[PromGauge](
            name="kvshare_member_info",
            documentation="What this engine does with the shared cache, and why; always 1.",
            labelnames=[*labelnames, *MEMBER_LABELS],
            multiprocess_mode="mostrecent",
        )
        self._children: dict[tuple[int, str], Any] = {}
        self._by_rank: dict[tuple[int, str], dict[str, float]] = {}
        self._shown: dict[int, list[str]] = {}
        for engine in labelvalues:
            for name, (labels, _) in COUNTERS.items():
                if not labels:  # a rate needs the zero before the first count
                    self._counter(engine, name)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's numbers of one engine. Names and engines that nobody has announced are left out."""
        if engine_idx not in self.per_engine_labelvalues:
            return
        engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for name, value in _part(transfer_stats_data, "counters").items():
            if (child := self._counter(engine_idx, name)) is not None:
                child.inc(value)
        for name, by_rank in _part(transfer_stats_data, "gauges").items():
            if name in self._gauges and by_rank:
                values = self._by_rank.setdefault((engine_idx, name), {})
                values.update(by_rank)
                self._gauges[name].labels(*engine).set(max(values.values()))
        for name, values in _part(transfer_stats_data, "samples").items():
            if name in self._histograms:
                self._observe_all(name, engine, values)
        if member := transfer_stats_data.get("member"):
            labels = [*engine, *(str(member.get(label, "")) for label in MEMBER_LABELS)]
            if (old := self._shown.get(engine_idx)) and old != labels:
                self._info.labels(*old).set(0)
            self._info.labels(*labels).set(1)
            self._shown[engine_idx] = labels

    def _observe_all(self, name: str, engine: Sequence[str], values: Sequence[float]) -> None:
        child = self._histograms[name].labels(*engine)
        for value in values:
            child.observe(value)

    def _counter(self, engine: int, key: str) -> Any:
        """The metric that counts under ``key``, or None for a key that the table does not know."""
        if (engine, key) not in self._children:
            name, *labels = key.split(":")
            if name not in self._counters or len(labels) != len(COUNTERS[name][0]):
                return None
            values = [str(value) for value in self.per_engine_labelvalues[engine]]
            self._children[engine, key] = self._counters[name].labels(*values, *labels)
        return self._children[engine, key]
