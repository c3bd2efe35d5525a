"""Stats: numbers of all processes add up in vLLM's own metrics."""

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram


@pytest.fixture
def stats(played: ModuleType) -> Iterator[ModuleType]:
    """The module, with an empty registry afterwards."""
    from kvshare_connector import stats as module

    before = set(REGISTRY._collector_to_names)
    yield module
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def _value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"engine": "0", **labels})


def _metrics(stats: ModuleType) -> Any:
    config = SimpleNamespace(kv_transfer_config=None)
    return stats.KVSharePromMetrics(
        config, {Counter: Counter, Gauge: Gauge, Histogram: Histogram}, ["engine"], {0: ["0"]}
    )


def test_counters_are_drained_once(stats: ModuleType) -> None:
    """C15: two steps never report the same number."""
    counters = stats.Counters()
    counters.add("loaded_blocks", 3)
    counters.add("loaded_blocks", 2)
    counters.add("lookups", 0)
    assert counters.drain() == {"loaded_blocks": 5}
    assert counters.drain() == {}


def test_ranks_and_scheduler_add_up(stats: ModuleType) -> None:
    """C16: neither side is changed by it, and the newest member information wins."""
    make = stats.KVShareStats
    first = make(data={"counters": {"saved_objects": 2}, "member": {"verdict": "shared"}})
    second = make(data={"counters": {"saved_objects": 3, "lookups": 1}, "member": None})
    both = first.aggregate(second)
    assert both.data == {"counters": {"saved_objects": 5, "lookups": 1}, "member": {"verdict": "shared"}}
    assert first.data["counters"] == {"saved_objects": 2}
    assert both.reduce() == {"lookups": 1, "saved_objects": 5}
    assert make(data={}).is_empty()
    assert make(data={}).aggregate(both).data["counters"] == both.data["counters"]
    both.reset()
    assert both.is_empty()


def test_failed_keys_have_one_metric_with_the_operation_as_label(stats: ModuleType) -> None:
    """The name that dashboards and the demo ask for."""
    metrics = _metrics(stats)
    metrics.observe({"counters": {"failed_get_keys": 2, "failed_put_keys": 1, "loaded_blocks": 4, "unheard_of": 1}})
    metrics.observe({"counters": {"failed_get_keys": 1}, "member": None})
    assert _value("kvshare_failed_keys_total", operation="get") == 3
    assert _value("kvshare_failed_keys_total", operation="put") == 1
    assert _value("kvshare_loaded_blocks_total") == 4


def test_the_member_metric_shows_one_verdict_at_a_time(stats: ModuleType) -> None:
    """After a change the old one reads 0."""
    metrics = _metrics(stats)
    labels = dict.fromkeys(stats.MEMBER_LABELS, "")
    shared, disabled = {**labels, "verdict": "shared"}, {**labels, "verdict": "disabled", "reason": "InternalError"}
    metrics.observe({"member": shared})
    metrics.observe({"member": disabled})
    assert _value("kvshare_member_info", **shared) == 0
    assert _value("kvshare_member_info", **disabled) == 1


def test_every_counter_of_the_code_is_in_the_table(stats: ModuleType) -> None:
    """A name that is missing there would be counted and never shown."""
    import re
    from pathlib import Path

    sources = "".join(path.read_text() for path in Path(str(stats.__file__)).parent.rglob("*.py"))
    used = set(re.findall(r'(?:counters\.add|_count)\(\s*"([a-z_]+)"', sources))
    assert used == set(stats.TABLE)
