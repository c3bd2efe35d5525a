"""The original proposal's keys in the real connector: they work as it documents them, and mistakes only isolate."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]
#: Without the size that the other tests give.
LCM: dict[str, Any] = {"store_tp_size": None, "enable_store_tp_lcm": True, "prefill_tp_sizes": [4, 2]}


def blocks(world: "World") -> list[str]:
    """Keys of blocks, shared or isolated."""
    return [key for key in world.store.keys if "/manifest" not in key]


@pytest.mark.parametrize("sizes", [[4, 2], "4,2", "s:2,4", ["4", "2"]])
def test_prefill_sizes_give_the_store_tp_size(world: "World", engines: "Callable[..., Engine]", sizes: object) -> None:
    """Prefill TP 4 and 2, decode TP 2 and 1: Store TP 4, for JSON and for dotted flags."""
    four = engines(world, "a", tp=4, role="prefill", extra={**LCM, "prefill_tp_sizes": sizes})
    two = engines(world, "b", tp=2, layout="LBHNC", role="prefill", extra={**LCM, "prefill_tp_sizes": sizes})
    decode = engines(world, "c", tp=1, role="decode", kv_role="kv_consumer", extra={**LCM, "prefill_tp_sizes": sizes})
    assert [engine.side.decision.store_tp for engine in (four, two, decode)] == [4, 4, 4]
    four.ask(PROMPT)
    assert two.ask(PROMPT) == 48
    assert decode.ask(PROMPT, max_tokens=20) == 48
    longer = [*PROMPT, *decode.outputs["c-0"]]
    assert two.ask([*longer, 7]) == 68 - 48  # what was decoded came back, the rest it has itself
    assert world.check_store() == 4 * (len(longer) // 4)


def test_a_size_and_a_list_that_say_the_same_share_with_either(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """The operator writes a size, the proposal's documents a list."""
    engines(world, "a", extra={"store_tp_size": 4}).ask(PROMPT)
    assert engines(world, "b", tp=2, extra=LCM).ask(PROMPT) == 48
    assert engines(world, "c", tp=4, extra={**LCM, "store_tp_size": "4"}).ask(PROMPT) == 48


@pytest.mark.parametrize(("switch", "saved"), [(True, 17), ("true", 17), (False, 0), ("false", 0), (None, 0)])
def test_decode_members_save_what_the_switch_says(
    world: "World", engines: "Callable[..., Engine]", switch: object, saved: int
) -> None:
    """Prompt blocks that it had to compute itself, and decoded ones."""
    extra = {"save_decode_cache": switch}
    engine = engines(world, "a", role="decode", kv_role="kv_consumer", extra=extra)
    engine.ask(PROMPT, max_tokens=20)
    assert world.check_store() == 4 * saved


WRONG: list[tuple[dict[str, object], tuple[str, ...]]] = [
    ({"store_tp_size": 0}, ("store_tp_size: 0 given",)),
    ({"store_tp_size": "four"}, ("store_tp_size: 'four' given",)),
    ({"store_tp_size": 4.0}, ("store_tp_size: 4.0 given",)),
    ({"store_tp_size": [4]}, ("store_tp_size: [4] given",)),
    ({**LCM, "prefill_tp_sizes": []}, ("prefill_tp_sizes: nothing given",)),
    ({**LCM, "prefill_tp_sizes": None}, ("prefill_tp_sizes: nothing given",)),
    ({**LCM, "prefill_tp_sizes": [4, "x"]}, ("prefill_tp_sizes: [4, 'x'] given",)),
    ({**LCM, "prefill_tp_sizes": {"4": 2}}, ("prefill_tp_sizes: {'4': 2} given",)),
    ({**LCM, "enable_store_tp_lcm": "on"}, ("enable_store_tp_lcm: 'on' given",)),
    ({"save_decode_cache": 1}, ("save_decode_cache: 1 given",)),
    ({"store_tp": 4, "prefill_tp_size": [2]}, ("store_tp: unknown key", "prefill_tp_size: unknown key")),
    ({"store_tp_size": -1, "save_decode_cache": "", "x": {}}, ("store_tp_size", "save_decode_cache", "x: unknown key")),
]


@pytest.mark.parametrize(("extra", "named"), WRONG, ids=lambda value: str(value)[:40])
def test_a_mistake_isolates_with_every_mistake_named_and_the_engine_serves(
    world: "World", engines: "Callable[..., Engine]", extra: dict[str, object], named: tuple[str, ...]
) -> None:
    """Its own cache still works, nobody else's is touched, and no step raises."""
    engines(world, "w").ask(PROMPT)
    others = set(world.store.keys)
    engine = engines(world, "a", tp=2, extra=extra)
    verdict = engine.side.decision.verdict
    assert (verdict.state, verdict.reason) == ("isolated", "ConfigInvalid")
    for text in named:
        assert text in verdict.message
    assert engine.ask(PROMPT, max_tokens=9) == 0
    assert engine.pool.reset_prefix_cache()
    assert engine.ask(PROMPT, max_tokens=9) == 48
    assert all("/i-" in key for key in set(blocks(world)) - others)
    assert engine.used_blocks == 0


IMPOSSIBLE: list[tuple[dict[str, object], str, str]] = [
    ({"store_tp_size": 3}, "StoreTPInvalid", "3"),
    ({"store_tp_size": 1}, "StoreTPInvalid", "1"),
    ({**LCM, "store_tp_size": 2}, "StoreTPInvalid", "remove one of them"),
    ({**LCM, "prefill_tp_sizes": [3, 2]}, "StoreTPInvalid", "3"),
]


@pytest.mark.parametrize(("extra", "reason", "words"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_sizes_that_do_not_fit_isolate_with_their_reason(
    world: "World", engines: "Callable[..., Engine]", extra: dict[str, object], reason: str, words: str
) -> None:
    """Well-formed numbers that this model or this pod cannot use."""
    engine = engines(world, "a", tp=2, extra=extra)
    verdict = engine.side.decision.verdict
    assert (verdict.state, verdict.reason) == ("isolated", reason)
    assert words in verdict.message
    assert engine.ask(PROMPT, max_tokens=3) == 0
    assert world.check_store() == 0


def test_two_engines_with_different_mistakes_do_not_meet(world: "World", engines: "Callable[..., Engine]") -> None:
    """What a wrong configuration meant to say is unknown."""
    engines(world, "a", tp=2, extra={"store_tp_size": "four"}).ask(PROMPT)
    assert engines(world, "b", tp=2, extra={"store_tp_size": "five"}).ask(PROMPT) == 0
    assert engines(world, "c", tp=2, extra={"store_tp_size": "four"}).ask(PROMPT) == 48
