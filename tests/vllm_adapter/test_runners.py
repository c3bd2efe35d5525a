"""Runners: both model runners drive the connector in their own order; what cannot be cached with them is refused."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from played_drafts import drafting

if TYPE_CHECKING:
    from played_engine import Engine, Rank, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


def older(rank: "Rank", monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A step as vLLM's first model runner makes it, with its own mixin."""
    from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

    drafting = rank.engine.config.speculative_config is not None

    def execute(output: Any, work: Any) -> Any:
        monkeypatch.setattr(mixin, "has_kv_transfer_group", lambda: True)
        monkeypatch.setattr(mixin, "get_kv_transfer_group", lambda: rank.whole)
        monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
        runner = mixin.KVConnectorModelRunnerMixin
        with runner.maybe_get_kv_connector_output(output, defer_finalize=drafting) as results:
            for item in work:
                rank._forward(item)
        if drafting:
            runner.finalize_kv_connector()
        return results

    return execute


def newer(rank: "Rank", monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A step as vLLM's second model runner makes it, with its own class."""
    from vllm.v1.worker.gpu import kv_connector as module

    monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(module, "get_forward_context", lambda: None)
    active = object.__new__(module.ActiveKVConnector)
    active.vllm_config, active.kv_connector = rank.engine.config, rank.whole
    active._pending_load_kwargs, active._disabled = None, False
    # vLLM 0.32 gives the batch and the attention's metadata too.
    given = inspect.signature(active.pre_forward).parameters.values()
    wanted = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in given)

    def execute(output: Any, work: Any) -> Any:
        batch = SimpleNamespace(idx_mapping=None, req_ids=[item.request_id for item in work], num_tokens=len(work))
        active.pre_forward(*(output, batch if work else None, {} if work else None)[:wanted])
        for item in work:
            rank._forward(item)
        active.finish_forward()
        return active.post_forward(output.finished_req_ids)

    return execute


@pytest.fixture(params=[older, newer], ids=["first", "second"])
def driven(
    request: pytest.FixtureRequest, engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> "Callable[..., Engine]":
    """Make engines whose ranks are driven by one of vLLM's model runners."""

    def make(*args: Any, **kwargs: Any) -> "Engine":
        engine = engines(*args, **kwargs)
        for rank in engine.ranks:
            monkeypatch.setattr(rank, "execute", request.param(rank, monkeypatch))
        return engine

    return make


@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_model_runners_save_and_load(world: "World", driven: "Callable[..., Engine]", asynchronous: bool) -> None:
    """C5, C16, C18: two sizes, two stages, decoded blocks; every byte that counts as computed is compared."""
    extra = {"pipeline_parallel_sizes": [1, 2]}
    one = driven(world, "a", tp=2, pp=2, asynchronous=asynchronous, extra=extra)
    two = driven(world, "b", tp=4, layout="LBHNC", asynchronous=asynchronous, extra=extra)
    assert one.ask(PROMPT) == 0
    assert two.ask(PROMPT, max_tokens=30) == 48
    longer = [*PROMPT, *two.outputs["b-0"], 5]
    assert one.ask(longer) == 76 - 48
    assert world.check_store() == 2 * 4 * (len(longer) // 4)
    assert one.used_blocks == two.used_blocks == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_model_runners_save_behind_the_draft_model(
    world: "World", driven: "Callable[..., Engine]", asynchronous: bool
) -> None:
    """C5: with drafts the step's results are collected before its saves begin; they come with the next step."""
    engine = driven(world, "a", tp=2, asynchronous=asynchronous, change=drafting(), accepts=lambda: 2)
    engine.ask(PROMPT, max_tokens=21)
    assert world.check_store() == (len(PROMPT) + 20) // 4 * 4
    assert engine.used_blocks == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_pooling_requests_share_with_requests_that_generate(
    world: "World", engines: "Callable[..., Engine]", asynchronous: bool
) -> None:
    """The same model computes the same cache; one that wants all of its tokens' states reads nothing."""
    from vllm.pooling_params import PoolingParams

    embed: dict[str, Any] = {"sampling_params": None, "pooling_params": PoolingParams(task="embed")}
    one, two = (engines(world, name, tp=tp, asynchronous=asynchronous) for name, tp in (("a", 2), ("b", 1)))
    one.add("p", PROMPT, **embed)
    one.run()
    assert world.check_store() == 48
    assert two.ask(PROMPT, max_tokens=3) == 48
    three = engines(world, "c", tp=4, asynchronous=asynchronous)
    three.add("p", PROMPT, **embed)
    three.run()
    assert three.count("hit_tokens") == 48
    four = engines(world, "d", asynchronous=asynchronous)
    all_tokens = PoolingParams(task="embed", skip_reading_prefix_cache=True)
    four.add("p", PROMPT, sampling_params=None, pooling_params=all_tokens)
    four.run()
    assert four.loads_planned == 0
    assert [engine.used_blocks for engine in (one, two, three, four)] == [0] * 4


def test_an_engine_that_may_fall_asleep_caches_nothing_and_says_why(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """Asleep, its cache has no memory, or other memory at the same address: a transfer would crash it or lie."""
    import copy

    def change(config: Any) -> None:
        config.model_config = copy.copy(config.model_config)
        config.model_config.enable_sleep_mode = True

    engine = engines(world, "a", tp=2, change=change)
    verdict = engine.side.decision.verdict
    assert (verdict.state, verdict.reason) == ("disabled", "SleepMode")
    assert "without --enable-sleep-mode" in verdict.message
    assert engine.ask(PROMPT, max_tokens=5) == 0
    assert world.store.keys == []


def test_an_engine_whose_weights_are_sent_to_it_keeps_to_itself(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """C10: reinforcement learning; its files say nothing about its weights, and two such engines never meet."""

    def change(config: Any) -> None:
        config.weight_transfer_config = SimpleNamespace(backend="nccl")

    first, second = engines(world, "a", change=change), engines(world, "b", change=change)
    verdict = first.side.decision.verdict
    assert (verdict.state, verdict.reason) == ("isolated", "WeightsUnknown")
    first.ask(PROMPT)
    assert second.ask(PROMPT) == 0
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    first.step_until(lambda: not first.side._resets.under_way)
    assert first.ask(PROMPT) == 0


def test_an_engine_without_any_cache_is_disabled(world: "World", engines: "Callable[..., Engine]") -> None:
    """Encoder-only models: no layer has a cache, the ranks say so, and nothing is allocated or opened."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvshare_connector.connector import KVShareConnector
    from kvshare_connector.wire import Report

    config = engines(world, "a").config
    empty = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[])
    rank = KVShareConnector(config, KVConnectorRole.WORKER, empty)
    scheduler = KVShareConnector(config, KVConnectorRole.SCHEDULER, empty)
    rank.register_kv_caches({})
    handshake = rank.get_handshake_metadata()
    assert handshake is not None
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
    decision = scheduler._scheduler_side.decision
    assert decision is not None
    assert (decision.verdict.state, decision.verdict.reason) == ("disabled", "NoKVCache")
    assert rank._worker_side._arena is None
    assert rank._worker_side._client is None
    assert isinstance(rank._worker_side.report(), Report)
    for side in (rank, scheduler):
        side.shutdown()
