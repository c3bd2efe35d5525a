"""Speculative decoding with windows: the block that drafting gives up leaves a shorter hit, which is valid too.

Blocks of 4 tokens and windows of 8, of which a hit needs the last two blocks, and with drafting the one before them.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from disturbances import traffic_with_aborts
from kvshare_connector.store import codes
from played_drafts import drafting

if TYPE_CHECKING:
    from played_engine import Engine, World
    from played_model import Shape

BLOCK, WINDOW, HEADS = 4, 8, 4
PROMPT = [3 + n * 7 % 90 for n in range(150)]
#: Windows of the layers, by what the layer of the draft behind them has.
DRAFTS = {"full attention": (5, (WINDOW, WINDOW, 0)), "a window": (6, (WINDOW, WINDOW, 0))}


def shape(draft: str = "") -> "Shape":
    """Two of three layers have a window; the layer of the draft, if there is one, as its name says."""
    from played_model import Shape

    layers, windows = DRAFTS.get(draft, (6, (WINDOW, WINDOW, 0)))
    return Shape(layers=layers, windows=windows, draft_layers=int(bool(draft)))


@pytest.fixture
def engines(engines: "Callable[..., Engine]") -> "Callable[..., Engine]":
    """Engines with room for the pins of three groups."""
    return lambda *args, **kwargs: engines(*args, **{"blocks": 4000, **kwargs})


def of_window(key: str) -> bool:
    """Whether a key is of a window."""
    return "/kwindow" in key


LENGTHS = [n + d for n in (BLOCK, WINDOW, WINDOW + BLOCK, 3 * WINDOW) for d in (-1, 0, 1)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("accepted", [0, 2, 3])
@pytest.mark.parametrize("draft", ["", *DRAFTS])
def test_prompts_around_windows_and_blocks_are_found_by_another_size(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]", draft: str, accepted: int, asynchronous: bool
) -> None:
    """B17, C5: from the text itself nothing is given up, with a draft model one block; every byte is compared."""
    world, change = new_world(shape(draft)), drafting("mtp" if draft else "ngram")
    one = engines(world, "a", tp=2, change=change, accepts=lambda: accepted, asynchronous=asynchronous)
    two = engines(
        world, "b", layout="LBHNC", change=change, accepts=lambda: accepted, asynchronous=asynchronous, group_order=-1
    )
    assert one.side.decision.namespace == two.side.decision.namespace
    assert one.side.decision.verdict.state == "shared"
    for number, length in enumerate(LENGTHS):
        prompt = [number + 3, *PROMPT[1:length]]
        assert one.ask(prompt, max_tokens=13) == 0
        blocks = (length - 1) // BLOCK
        assert two.ask(prompt, max_tokens=9) == max(0, blocks - 1 if draft else blocks) * BLOCK
    assert world.check_store() > 0
    assert one.used_blocks == two.used_blocks == 0


def test_a_draft_renames_nothing(new_world: "Callable[..., World]", engines: "Callable[..., Engine]") -> None:
    """Kinds, and so keys behind the namespace, are called by what they are, wherever the draft moves the groups."""
    worlds = [new_world(shape(draft)) for draft in ("", *DRAFTS)]
    made = [engines(world, f"e{n}", change=drafting("mtp"), group_order=(-1) ** n) for n, world in enumerate(worlds)]
    assert {tuple(sorted(kind.name for kind in one.side.decision.kinds)) for one in made} == {("full", "window8-")}
    for world, one in zip(worlds, made, strict=True):
        one.ask(PROMPT[:40])
        assert {key.split("/k")[-1] for key in world.store.keys if "/k" in key and "p0" in key} == {
            f"{kind}s{shard}p0" for kind in ("full", "window8-") for shard in range(HEADS)
        }


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("gone", [0, 33, 34, 35, 36])
def test_a_missing_block_of_a_window_shortens_the_hit_to_the_longest_valid_one(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]", gone: int, draft: str
) -> None:
    """37 blocks are there, 36 are used, whose window is blocks 34 and 35; the block given up must be there too."""
    world, change = new_world(shape(draft)), drafting("eagle")
    engines(world, "a", tp=2, change=change).ask(PROMPT)
    world.store.evict(lambda key: of_window(key) and world.number(key) == gone and "s2p0" in key)
    two = engines(world, "b", tp=4, change=change)
    assert two.ask(PROMPT, max_tokens=5) == (36 if gone < 34 else max(0, gone - 1)) * BLOCK
    world.check_store()


@pytest.mark.parametrize("local", [0, 20, 52, 148])
@pytest.mark.parametrize("marked", [False, True])
def test_a_local_hit_is_completed_and_asked_for_once(
    new_world: "Callable[..., World]",
    engines: "Callable[..., Engine]",
    local: int,
    marked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine gives up the last block of its own hit; ``marked``: of the cache group that has the draft only."""
    import played_engine

    plain = played_engine.Engine.cache_config

    def with_mark(engine: "Engine", *args: Any) -> Any:
        config = plain(engine, *args)
        for group in config.kv_cache_groups:
            group.is_eagle_group = any(".5." in name for name in group.layer_names)
        return config

    if marked:
        monkeypatch.setattr(played_engine.Engine, "cache_config", with_mark)
    world, change = new_world(shape("full attention")), drafting("mtp")
    engines(world, "w", change=change).ask(PROMPT)
    reader = engines(world, "a", tp=2, change=change)
    assert len(reader.scheduler.kv_cache_manager.coordinator.eagle_group_ids) == (1 if marked else 3)
    if local:
        reader.ask(PROMPT[: local + 1], max_tokens=2)
    before = reader.count("lookups")
    own = max(0, local - BLOCK)
    assert reader.ask(PROMPT, max_tokens=9) == max(0, 36 * BLOCK - own)
    assert reader.count("lookups") - before == 1
    assert reader.used_blocks == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("bad", ["/kfull", "/kwindow"])
def test_a_load_that_fails_is_computed_from_the_start(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]", bad: str, asynchronous: bool
) -> None:
    """D2: reported by request; drafts go on."""
    world, change = new_world(shape("full attention")), drafting("mtp")
    engines(world, "a", change=change).ask(PROMPT)
    two = engines(world, "b", tp=2, asynchronous=asynchronous, change=change, accepts=lambda: 2)
    two.faults.fail("get", codes.TRANSFER_FAIL, lambda key: bad in key and "s3p0" in key and world.number(key) == 35)
    assert two.ask(PROMPT, max_tokens=9) == 0
    assert two.count("failed_loads") == two.loads_planned == 1
    assert two.used_blocks == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("draft", ["", *DRAFTS])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_drafts(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]", seed: int, draft: str, asynchronous: bool
) -> None:
    """C5, C9, C13: preemptions, aborts and any number of accepted drafts; every byte in cache and store is compared."""
    dice, world = random.Random(seed), new_world(shape(draft))
    one, two = (
        engines(
            world, name, tp=tp, blocks=140, asynchronous=asynchronous, change=drafting("mtp" if draft else "ngram"),
            accepts=lambda: dice.randrange(4),
        )
        for name, tp in (("a", 2), ("b", 4))
    )  # fmt: skip
    traffic_with_aborts(dice, world, (one, two), longest=60, requests=25)
