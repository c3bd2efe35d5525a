"""Speculative decoding: accepted tokens are saved, rejected ones never, and the last block of a hit is dropped once."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from disturbances import traffic_with_aborts
from played_drafts import drafting

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_drafts_are_never_saved(
    world: "World", engines: "Callable[..., Engine]", accepted: int, asynchronous: bool
) -> None:
    """C5, C9: drafts of three, blocks of four: boundaries fall inside rejected parts, and everything accepted is saved.

    Rejected drafts leave other bytes in the cache than the tokens that come instead, so a block saved too early shows.
    """
    # Room for pins of all blocks: a busy machine sends slowly, and what has no room is dropped at the end.
    engine = engines(
        world, "a", tp=2, blocks=600, asynchronous=asynchronous, change=drafting(), accepts=lambda: accepted
    )
    assert engine.ask(PROMPT, max_tokens=41) == 0
    complete = (len(PROMPT) + 41 - 1) // 4  # the last token was sampled and never computed
    assert world.check_store() == complete * 4
    assert sum(len(m.step.saves) for m in engine.metadata) > 1
    assert engine.used_blocks == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_with_drafts(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]", seed: int, asynchronous: bool
) -> None:
    """C5, C9, C13: preemptions, aborts and any number of accepted drafts; every byte in cache and store is compared."""
    dice, world = random.Random(seed), new_world()
    one, two = (
        engines(
            world, name, tp=tp, blocks=40, asynchronous=asynchronous, change=drafting(),
            accepts=lambda: dice.randrange(4), extra={"pipeline_parallel_sizes": [1]},
        )
        for name, tp in (("a", 2), ("b", 4))
    )  # fmt: skip
    traffic_with_aborts(dice, world, (one, two), longest=40, requests=30)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("local", [0, 20, 48])
def test_what_is_loaded_is_what_the_engine_counts_as_computed(
    world: "World", engines: "Callable[..., Engine]", local: int, asynchronous: bool
) -> None:
    """B17: an engine whose draft needs hidden states computes the last found block again; it is dropped once.

    The engine checks the bytes of every token that it counts as computed, so a block that two layers dropped, and that
    nobody filled, shows; so does a load that is longer than what the engine was told.
    """
    change = drafting("eagle")
    engines(world, "w", change=change).ask(PROMPT)
    reader = engines(world, "a", tp=2, asynchronous=asynchronous, change=change)
    if local:
        reader.ask(PROMPT[: local + 1], max_tokens=2)
    known = reader.count("hit_tokens")
    own = max(0, local - 4)  # the engine drops the last block of its own hit in the same way
    found = reader.ask(PROMPT, max_tokens=9)
    assert found == max(0, 48 - 4 - own)
    assert reader.count("hit_tokens") - known == found
    loads = [plan for m in reader.metadata for plan in m.step.loads]
    assert sum(len(plan.block_ids) for plan in loads[-1:]) * 4 == found or not found
    assert reader.used_blocks == 0


def test_a_method_that_needs_no_hidden_states_drops_nothing(world: "World", engines: "Callable[..., Engine]") -> None:
    """B17: drafts from the prompt itself."""
    engines(world, "w", change=drafting()).ask(PROMPT)
    assert engines(world, "a", tp=2, change=drafting()).ask(PROMPT) == 48


def test_layers_of_a_draft_model_are_stored_with_the_last_stage(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]"
) -> None:
    """MTP and EAGLE: their layers count on behind the model's, on the last pipeline rank; readers of another split."""
    from played_model import Shape

    world = new_world(Shape(draft_layers=1))
    extra = {"pipeline_parallel_sizes": [1, 2]}
    writer = engines(world, "a", tp=2, change=drafting("mtp"), extra=extra)
    assert [list(stage.layers) for stage in writer.side.decision.stages[0]] == [[0, 1], [2, 3, 4]]
    writer.ask(PROMPT, max_tokens=12)
    reader = engines(world, "b", tp=4, layout="BLHNC", change=drafting("mtp"), extra=extra)
    assert reader.ask([*PROMPT, *writer.outputs["a-0"]]) == 60 - 4
    assert world.check_store() == 15 * 4 * 2


@pytest.mark.parametrize("prefix", ["mtp", "draft_model.model"])
def test_layers_of_a_draft_may_be_numbered_anew(
    new_world: "Callable[..., World]",
    engines: "Callable[..., Engine]",
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`mtp.layers.0` is not layer 0 of the model; engines of two sizes and splits share all layers."""
    import played_engine
    from played_model import Shape

    def name(layer: int) -> str:
        return f"model.layers.{layer}.self_attn.attn" if layer < 4 else f"{prefix}.layers.{layer - 4}.self_attn.attn"

    def number(of: str) -> int:
        return next(layer for layer in range(5) if name(layer) == of)

    monkeypatch.setattr(played_engine, "_name", name)
    monkeypatch.setattr(played_engine, "_layer", number)
    world = new_world(Shape(draft_layers=1))
    writer = engines(world, "a", tp=2, change=drafting("mtp"), extra={"pipeline_parallel_sizes": [1, 2]})
    assert writer.side.decision.kinds[0].layers == (0, 1, 2, 3, 4)
    writer.ask(PROMPT, max_tokens=12)
    reader = engines(
        world, "b", tp=4, layout="BLHNC", change=drafting("mtp"), extra={"pipeline_parallel_sizes": [1, 2]}
    )
    assert reader.ask([*PROMPT, *writer.outputs["a-0"]]) == 60 - 4
    assert world.check_store() == 15 * 4 * 2


def test_engines_with_and_without_a_draft_model_do_not_meet(world: "World", engines: "Callable[..., Engine]") -> None:
    """Their caches differ by the draft's layers; the fingerprint says so by name."""
    plain, drafted = engines(world, "a"), engines(world, "b", change=drafting("mtp"))
    plain.ask(PROMPT)
    assert drafted.ask(PROMPT) == 0
    from kvshare_layout.fingerprint import differing_fields

    mine, other = (dict(engine.side.decision.manifest) for engine in (plain, drafted))
    assert set(differing_fields(mine, other)) == {"speculative", "draft_drop"}


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafts_from_the_text_itself_leave_blocks_as_they_are(
    world: "World", engines: "Callable[..., Engine]", method: str
) -> None:
    """No layers, no dropped block: such engines and those that do not speculate have one namespace."""
    plain, drafted = engines(world, "a", tp=2), engines(world, "b", change=drafting(method), accepts=lambda: 1)
    assert plain.side.decision.namespace == drafted.side.decision.namespace
    drafted.ask(PROMPT, max_tokens=12)
    assert plain.ask([*PROMPT, *drafted.outputs["b-0"]]) == 60
    assert world.check_store() == 15 * 4


@pytest.mark.parametrize("runner", [False, True])
def test_pipelines_with_drafts_are_refused_where_ranks_would_never_save(
    world: "World", engines: "Callable[..., Engine]", runner: bool
) -> None:
    """C6: the older model runner finalises the last pipeline rank only; the newer one all of them."""

    def change(config: Any) -> None:
        drafting()(config)
        old = config.__class__
        config.__class__ = type("Config", (old,), {"use_v2_model_runner": property(lambda _: runner)})

    extra = {"pipeline_parallel_sizes": [1, 2]}
    engine = engines(world, "a", pp=2, change=change, extra=extra)
    verdict = engine.side.decision.verdict
    if runner:
        assert verdict.state == "shared"
        engine.ask(PROMPT, max_tokens=9)
        assert world.check_store() == 14 * 4 * 2
        return
    assert (verdict.state, verdict.reason) == ("disabled", "PipelineWithDraft")
    assert engine.ask(PROMPT, max_tokens=9) == 0
    assert world.store.keys == []
