"""Stats: numbers of all processes add up in vLLM's own metrics."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvshare_connector import counters as tables
from kvshare_connector.counters import Counters
from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]
TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


@pytest.fixture
def stats(played: ModuleType) -> Iterator[ModuleType]:
    """The module, with an empty registry afterwards."""
    from kvshare_connector import stats as module

    before = set(REGISTRY._collector_to_names)
    yield module
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def _value(name: str, engine: str = "0", **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"engine": engine, **labels})


def _metrics(stats: ModuleType, engines: int = 1) -> Any:
    config = SimpleNamespace(kv_transfer_config=None)
    return stats.KVSharePromMetrics(config, TYPES, ["engine"], {i: [str(i)] for i in range(engines)})


def test_counters_are_drained_once() -> None:
    """C15: two steps never report the same number."""
    counters = Counters()
    counters.add("loaded_blocks", 3)
    counters.add("loaded_blocks", 2)
    counters.add("lookups", 0)
    assert counters.drain() == {"loaded_blocks": 5}
    assert counters.drain() == {}


def test_everything_is_taken_once_and_gauges_only_when_they_have_changed() -> None:
    """C15: a step that has nothing new to say says nothing."""
    counters = Counters("rank 3")
    counters.add("lookups")
    counters.set("arena_used_bytes", 7)
    counters.observe("keys_per_lookup", 5)
    assert counters.take() == {
        "counters": {"lookups": 1}, "gauges": {"arena_used_bytes": {"rank 3": 7}}, "samples": {"keys_per_lookup": [5]},
    }  # fmt: skip
    counters.set("arena_used_bytes", 7)
    assert not counters.urgent
    assert counters.take() == {"counters": {}, "gauges": {}, "samples": {}}
    counters.blocked("worker", "start_load_kv", 0.5)
    assert not counters.urgent
    counters.set("arena_used_bytes", 0)
    assert counters.urgent
    taken = counters.take()
    assert taken["gauges"] == {"arena_used_bytes": {"rank 3": 0}}
    assert taken["counters"]["blocked_microseconds:worker:start_load_kv"] == 500_000
    assert taken["counters"]["hook_calls:worker:start_load_kv"] == 1


def test_samples_that_wait_are_bounded() -> None:
    """An engine that nobody asks for its figures does not grow."""
    counters = Counters()
    for number in range(tables.MOST_SAMPLES + 10):
        counters.observe("keys_per_lookup", number)
    assert len(counters.take()["samples"]["keys_per_lookup"]) == tables.MOST_SAMPLES


def test_ranks_and_scheduler_add_up(stats: ModuleType) -> None:
    """C16: neither side is changed by it, and the newest member information wins."""
    make = stats.KVShareStats
    first = make(
        data={
            "counters": {"saved_objects": 2, "segments:put": 4}, "member": {"verdict": "shared"},
            "gauges": {"arena_used_bytes": {"rank 0": 5, "rank 1": 6}}, "samples": {"keys_per_lookup": [1]},
        }
    )  # fmt: skip
    second = make(
        data={
            "counters": {"saved_objects": 3, "lookups": 1, "segments:get": 2}, "member": None,
            "gauges": {"arena_used_bytes": {"rank 1": 2}}, "samples": {"keys_per_lookup": [2, 3]},
        }
    )  # fmt: skip
    both = first.aggregate(second)
    assert both.data == {
        "counters": {"saved_objects": 5, "lookups": 1, "segments:put": 4, "segments:get": 2},
        "gauges": {"arena_used_bytes": {"rank 0": 5, "rank 1": 2}},
        "samples": {"keys_per_lookup": [1, 2, 3]},
        "member": {"verdict": "shared"},
    }
    assert first.data["counters"]["saved_objects"] == 2
    assert first.data["gauges"]["arena_used_bytes"]["rank 1"] == 6
    assert both.reduce() == {"lookups": 1, "saved_objects": 5, "segments": 6, "arena_used_bytes": 5}
    assert make(data={}).is_empty()
    assert make(data={"counters": {}, "gauges": {}, "samples": {}, "member": None}).is_empty()
    assert make(data={}).aggregate(both).data == both.data
    both.reset()
    assert both.is_empty()


def test_failed_keys_have_one_metric_with_operation_and_code_as_labels(stats: ModuleType) -> None:
    """The name that dashboards and the demo ask for; its sum counts every key once."""
    metrics = _metrics(stats)
    metrics.observe({
        "counters": {
            "failed_keys:get:OBJECT_NOT_FOUND": 2, "failed_keys:put:NO_AVAILABLE_HANDLE": 1, "loaded_blocks": 4,
            "unheard_of": 1, "failed_keys:get": 7, "lookups:extra": 3,
        }
    })  # fmt: skip
    metrics.observe({"counters": {"failed_keys:get:OBJECT_NOT_FOUND": 1}, "member": None})
    assert _value("kvshare_failed_keys_total", operation="get", code="OBJECT_NOT_FOUND") == 3
    assert _value("kvshare_failed_keys_total", operation="put", code="NO_AVAILABLE_HANDLE") == 1
    assert _value("kvshare_loaded_blocks_total") == 4
    assert _value("kvshare_lookups_total") == 0


def test_a_gauge_shows_the_rank_with_the_largest_value(stats: ModuleType) -> None:
    """Ranks report at different times; what one of them last said stays until it says something else."""
    metrics = _metrics(stats)
    metrics.observe({"gauges": {"arena_used_bytes": {"rank 0": 9, "rank 1": 4}}})
    metrics.observe({"gauges": {"arena_used_bytes": {"rank 0": 0}}})
    assert _value("kvshare_arena_used_bytes") == 4
    metrics.observe({"gauges": {"arena_used_bytes": {"rank 1": 0}}})
    assert _value("kvshare_arena_used_bytes") == 0


def test_engines_of_one_process_are_told_apart(stats: ModuleType) -> None:
    """Data parallel: each engine's numbers, gauges and verdict stand under its own label."""
    metrics = _metrics(stats, engines=2)
    labels = dict.fromkeys(tables.MEMBER_LABELS, "")
    for engine, verdict in ((0, "shared"), (1, "isolated")):
        metrics.observe(
            {
                "counters": {"saved_bytes": 5 + engine}, "gauges": {"arena_bytes": {"rank 0": 100 + engine}},
                "samples": {"keys_per_lookup": [3] * (engine + 1)}, "member": {**labels, "verdict": verdict},
            },
            engine,
        )  # fmt: skip
    metrics.observe({"counters": {"saved_bytes": 1}}, 7)
    for engine, verdict in ((0, "shared"), (1, "isolated")):
        assert _value("kvshare_saved_bytes_total", str(engine)) == 5 + engine
        assert _value("kvshare_arena_bytes", str(engine)) == 100 + engine
        assert _value("kvshare_keys_per_lookup_count", str(engine)) == engine + 1
        assert _value("kvshare_keys_per_lookup_bucket", str(engine), le="16.0") == engine + 1
        assert _value("kvshare_keys_per_lookup_bucket", str(engine), le="1.0") == 0
        assert _value("kvshare_member_info", str(engine), **{**labels, "verdict": verdict}) == 1


def test_the_member_metric_shows_one_verdict_at_a_time(stats: ModuleType) -> None:
    """After a change the old one reads 0."""
    metrics = _metrics(stats)
    labels = dict.fromkeys(tables.MEMBER_LABELS, "")
    shared, disabled = {**labels, "verdict": "shared"}, {**labels, "verdict": "disabled", "reason": "InternalError"}
    metrics.observe({"member": shared})
    metrics.observe({"member": disabled})
    assert _value("kvshare_member_info", **shared) == 0
    assert _value("kvshare_member_info", **disabled) == 1


def test_every_number_of_the_code_is_in_a_table() -> None:
    """A name that is missing there would be counted and never shown; one that nobody counts would always be 0."""
    sources = "".join(path.read_text() for path in Path(str(tables.__file__)).parent.rglob("*.py"))
    counted = set(
        re.findall(r'(?:counters\.add|self\._count|self\.count|rank\.count|self\._values\[)\(?\s*f?"([a-z_]+)', sources)
    )
    assert counted | {"blocked_microseconds", "hook_calls", "scheduler_seconds"} == set(tables.COUNTERS)
    assert set(re.findall(r'counters\.set\(\s*"([a-z_]+)"', sources)) == set(tables.GAUGES)
    assert set(re.findall(r'counters\.observe\(\s*"([a-z_]+)"', sources)) == set(tables.HISTOGRAMS)


@pytest.mark.parametrize("beside", [False, True])
def test_what_all_ranks_and_the_scheduler_count_arrives_in_vllms_metrics(
    world: "World", engines: "Callable[..., Engine]", stats: ModuleType, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """E1, E2: bytes, objects, hits, keys of lookups, failures, time and arena, alone and inside MultiConnector.

    Through vLLM's aggregation over four ranks, its scheduler's statistics, serialisation, and its own observer.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    other = {"kv_connector": "OtherConnector", "kv_connector_module_path": "other_connector", "kv_role": "kv_both"}
    extra = {"pipeline_parallel_sizes": [1, 2]}
    engines(world, "w", extra=extra).ask(PROMPT)
    world.store.evict([key for key in world.store.keys if world.number(key) == 5 and key.endswith("s1p1")])
    engine = engines(world, "a", tp=2, pp=2, beside=[other] if beside else (), extra=extra)
    prom = KVConnectorProm(engine.config, ["engine"], {0: ["0"]})
    update = engine.scheduler.update_from_output

    def observed(*args: Any) -> Any:
        outputs = update(*args)
        for item in outputs.values():
            if item.scheduler_stats is not None and item.scheduler_stats.kv_connector_stats:
                prom.observe(json.loads(json.dumps(item.scheduler_stats.kv_connector_stats)), 0)
        return outputs

    monkeypatch.setattr(engine.scheduler, "update_from_output", observed)
    engine.run().ready()
    engine.side._membership._labels = dict.fromkeys(tables.MEMBER_LABELS, "x")
    engine.faults.fail("get", codes.TRANSFER_FAIL, lambda key: key.endswith("s3p0") and world.number(key) == 3)
    engine.ask(PROMPT, max_tokens=2)
    engine.ask([1, 2, 3])
    assert _value("kvshare_asked_tokens_total") == 50 + 3
    assert _value("kvshare_found_tokens_total") == 20
    assert _value("kvshare_hit_tokens_total") == 12
    assert _value("kvshare_lookups_total") == 1
    # One representative key of each block, then the other seven of the blocks in front of the first miss.
    assert (_value("kvshare_keys_per_lookup_sum") or 0) == _value("kvshare_lookup_keys_total", kind="full")
    assert _value("kvshare_keys_per_lookup_count") == 1
    object_bytes = 2 * 4 * 8  # layers of a stage, tokens, cell: one head each
    # Four ranks read two objects of each of five blocks; the rank with the failure counts what arrived.
    assert _value("kvshare_loaded_objects_total") == 4 * 2 * 5 - 1
    assert _value("kvshare_loaded_bytes_total") == (4 * 2 * 5 - 1) * object_bytes
    assert _value("kvshare_segments_total", operation="get") == 4 * 2 * 5
    assert _value("kvshare_failed_keys_total", operation="get", code="TRANSFER_FAIL") == 1
    assert _value("kvshare_failed_loads_total") == 1
    # Blocks 3 to 11 were computed; what the store has already is offered again and stays as it is.
    assert (_value("kvshare_saved_objects_total") or 0) >= 8
    assert (_value("kvshare_arena_bytes") or 0) == 1 << 16
    assert (_value("kvshare_arena_high_water_bytes") or 0) >= object_bytes
    assert _value("kvshare_segments_per_object") == 1
    assert _value("kvshare_objects_per_block") == 2
    for process, hook, ranks in (("scheduler", "build_connector_meta", 1), ("worker", "start_load_kv", 4)):
        calls = _value("kvshare_hook_calls_total", process=process, hook=hook)
        spent = _value("kvshare_blocked_microseconds_total", process=process, hook=hook)
        assert (calls or 0) >= ranks
        assert 0 < (spent or 0) < 20e6
    assert _value("kvshare_member_info", **dict.fromkeys(tables.MEMBER_LABELS, "x")) == 1


def test_a_full_arena_is_seen_as_waits(world: "World", engines: "Callable[..., Engine]") -> None:
    """F6: the store hangs, halves run out, saves wait, and then saves are dropped."""
    one = engines(world, "a", blocks=100, extra={"staging_bytes": 1 << 10})
    gate = one.faults.hang("put", lambda key: "kfull" in key)
    for number in range(12):
        one.add(f"r{number}", [number + 3] * 30, max_tokens=4)
    arena: Any = one.ranks[0].connector._worker_side._arena
    one.step_until(lambda: len(one.outputs["r11"]) == 4 and arena.send.used_bytes == 1 << 9)
    assert arena.send.most_bytes == 1 << 9
    gate.set()
    one.run()
    one.ask([1, *PROMPT])
    assert arena.send.used_bytes == 0
    assert one.count("arena_waits:put") > 0
    assert one.count("arena_wait_seconds:put") > 0
    assert one.count("dropped_save_blocks") > 0
