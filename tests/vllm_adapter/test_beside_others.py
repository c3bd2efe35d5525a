"""Beside others: the connector as a child of vLLM's own MultiConnector, over whole lives of requests."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]
OTHER = {"kv_connector": "OtherConnector", "kv_connector_module_path": "other_connector", "kv_role": "kv_both"}


@pytest.fixture
def beside(other: Any, engines: "Callable[..., Engine]") -> "Callable[..., Engine]":
    """Make engines with both connectors, ready for requests."""
    assert other

    def make(*args: Any, **kwargs: Any) -> "Engine":
        return engines(*args, beside=[OTHER], **kwargs).run().ready()

    return make


def test_facts_come_with_steps_before_any_request(world: "World", engines: "Callable[..., Engine]", other: Any) -> None:
    """No handshake of ours reaches the other connector; the idle engine steps until the facts are there."""
    assert other
    engine = engines(world, "a", tp=2, pp=2, beside=[OTHER], extra={"pipeline_parallel_sizes": [1, 2]})
    assert [rank.connector.get_handshake_metadata() for rank in engine.ranks] == [None] * 4
    assert engine.side.decision is None
    assert engine.run().side.decision.verdict.state == "shared"
    assert not engine.whole.has_pending_push_work()


def test_a_request_before_the_facts_is_computed_and_saved_at_its_end(
    world: "World", engines: "Callable[..., Engine]", other: Any
) -> None:
    """Lookups answer "no hit" until then, and nothing is lost."""
    assert other
    engines(world, "w").ask(PROMPT)
    early = engines(world, "a", beside=[OTHER])
    assert early.ask([*PROMPT[:4], *PROMPT], max_tokens=9) == 0
    early.ready()
    assert world.check_store() == 4 * (12 + 15 - 1)  # the first block is the same


def test_a_reset_before_the_facts_empties_the_namespace_once_it_is_known(
    world: "World", engines: "Callable[..., Engine]", other: Any
) -> None:
    """C10: the caller is told that the cache is empty, so nothing older may be found; then the engine caches on."""
    assert other
    engines(world, "w").ask(PROMPT)
    early = engines(world, "a", beside=[OTHER])
    assert early.side.decision is None
    assert early.scheduler.reset_prefix_cache(reset_connector=True)
    early.run().ready()
    early.step_until(lambda: not early.side._resets.under_way)
    assert early.ask(PROMPT) == 0
    assert world.check_store() == 4 * 12
    assert engines(world, "b").ask(PROMPT) == 48


@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_topology_reads_what_one_has_written(
    world: "World", beside: "Callable[..., Engine]", asynchronous: bool
) -> None:
    """Two sizes, two layouts and two pipeline splits, each beside another connector; all bytes are compared."""
    extra = {"pipeline_parallel_sizes": [1, 2]}
    one = beside(world, "a", tp=2, pp=2, asynchronous=asynchronous, extra=extra)
    two = beside(world, "b", tp=4, layout="LBHNC", asynchronous=asynchronous, extra=extra)
    assert one.ask(PROMPT) == 0
    assert two.ask(PROMPT, max_tokens=30) == 48
    longer = [*PROMPT, *two.outputs["b-0"], 5]
    assert one.ask(longer) == 76 - 48
    assert world.check_store() == 2 * 4 * (len(longer) // 4)
    assert one.used_blocks == two.used_blocks == 0


def test_an_engine_alone_and_one_beside_others_share(
    world: "World", engines: "Callable[..., Engine]", beside: "Callable[..., Engine]"
) -> None:
    """Where the connector is loaded is no part of the fingerprint."""
    engines(world, "a", tp=2).ask(PROMPT)
    assert beside(world, "b").ask(PROMPT) == 48


def test_a_failed_load_of_ours_is_computed(world: "World", beside: "Callable[..., Engine]") -> None:
    """The bad blocks reach the scheduler through MultiConnector, and the request does not ask again."""
    beside(world, "a").ask(PROMPT)
    reader = beside(world, "b", tp=2)
    reader.faults.fail("get", codes.TRANSFER_FAIL, lambda key: key.endswith("s2p0"))
    assert reader.ask(PROMPT, max_tokens=3) == 0
    assert reader.loads_planned == 1
    assert reader.used_blocks == 0


def test_hits_of_the_other_connector_are_its_own(world: "World", beside: "Callable[..., Engine]", other: Any) -> None:
    """It comes first: ours plans nothing, its failed load is computed, and the next request is ours again."""
    beside(world, "a").ask(PROMPT)
    reader = beside(world, "b", tp=2)
    other.hits = {"r": 48}
    reader.add("r", PROMPT, max_tokens=3)
    reader.run()
    assert reader.outputs["r"] == reader.answer("r")[:3]
    assert reader.loads_planned <= 1
    assert world.check_store() >= 48
    assert reader.used_blocks == 0


def test_an_abort_while_the_other_connector_loads_saves_nothing(
    world: "World", beside: "Callable[..., Engine]", other: Any
) -> None:
    """The engine counts the other's tokens as computed at once; their blocks hold anything."""
    engine = beside(world, "a")
    other.hits, other.finishing = {"r": 48}, False
    engine.add("r", PROMPT)
    for _ in range(5):
        engine.step()
    engine.abort("r")
    other.finishing = True
    engine.run()
    assert world.check_store() == 0
    assert engine.used_blocks == 0


@pytest.mark.parametrize("end", ["works", "abort"])
def test_a_load_in_the_step_that_needs_it_proves_nothing_before_its_results(
    world: "World", beside: "Callable[..., Engine]", other: Any, end: str
) -> None:
    """The other connector loads synchronously, and the engine schedules ahead: no result says yet that it worked."""
    from vllm.v1.outputs import ModelRunnerOutput

    engine = beside(world, "a", asynchronous=True)
    other.hits, other.synchronous = {"r": 48}, True

    def schedule_until(reached: Callable[[Any], bool]) -> Any:
        """Schedule, and carry nothing out, until a step is as wanted: our own lookups take their time."""
        for _ in range(5000):
            output = engine.scheduler.schedule()
            jobs = output.kv_connector_metadata.metadata[1].step.saves
            saved.extend(number for job in jobs for part in job.blocks for number in part.numbers)
            if reached(output):
                return output
            time.sleep(0.001)
        raise TimeoutError(engine.describe())

    saved: list[int] = []
    engine.add("r", PROMPT, max_tokens=1500)
    first = schedule_until(lambda output: output.has_sync_kv_loads)
    engine.add("s", PROMPT)  # finds the blocks of the first one in the engine's own cache
    schedule_until(lambda output: "s" in output.num_scheduled_tokens)
    schedule_until(lambda output: True)
    if end == "abort":
        engine.abort("r")
        engine.abort("s")
        schedule_until(lambda output: True)
        assert saved == []
        return
    assert saved == []
    engine.scheduler.update_from_output(first, ModelRunnerOutput(["r"], {"r": 0}, sampled_token_ids=[[7]]))
    schedule_until(lambda output: True)
    assert saved == list(range(12))


def test_slow_weights_hold_no_step_up(
    world: "World", engines: "Callable[..., Engine]", other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are served without a cache until the weights have been read; then the engine decides."""
    assert other
    from kvshare_connector.scheduler import engine_facts

    gate, identify = threading.Event(), engine_facts.identify_weights

    def slowly(config: Any) -> tuple[str, str]:
        gate.wait(20)
        return identify(config)

    monkeypatch.setattr(engine_facts, "identify_weights", slowly)
    engine = engines(world, "a", beside=[OTHER])
    assert engine.ask(PROMPT) == 0
    assert engine.side.decision is None
    gate.set()
    engine.side._membership._weights.result(20)
    engine.ask([*PROMPT, 7])
    assert engine.ready().side.decision.verdict.state == "shared"
    assert world.check_store() == 4 * 12


def test_statistics_survive_the_way_through_multi_connector(played: Any) -> None:
    """MultiConnector looks the class up by its name, in the process that logs."""
    assert played
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from kvshare_connector.stats import KVShareStats

    built = MultiConnector.build_kv_connector_stats({"KVShareConnector": {"counters": {"lookups": 2}, "member": None}})
    assert isinstance(built["KVShareConnector"], KVShareStats)
    assert built.reduce() == {"KVShareConnector": {"lookups": 2}}
