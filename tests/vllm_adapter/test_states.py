"""Recurrent states beside attention: vLLM's own managers say where a state is right, and only there is it used.

Blocks of 4 tokens; one layer of three has attention, the others a state, in two cache groups. The writing engine leaves
a state behind at the end of each of its steps and at the last block end of a prompt, so that is where hits end.
"""

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.store import codes
from played_drafts import drafting

if TYPE_CHECKING:
    from played_engine import World
    from played_states import StateEngine, StateWorld

BLOCK, HEADS, LAYERS = 4, 4, 6
PROMPT = [3 + n * 7 % 90 for n in range(150)]


@pytest.fixture
def hybrid(new_world: "Callable[..., World]") -> "StateWorld":
    """A world whose model has states."""
    from played_model import Shape
    from played_states import StateWorld

    plain = new_world(Shape(layers=LAYERS))
    return StateWorld(plain.config, plain.shape)


@pytest.fixture
def engines(hybrid: "StateWorld") -> "Iterator[Callable[..., StateEngine]]":
    """Make engines that end with the test."""
    from played_states import StateEngine

    made: list[StateEngine] = []

    def make(*args: Any, **kwargs: Any) -> StateEngine:
        made.append(StateEngine(hybrid, *args, **{"blocks": 4000, **kwargs}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def objects(world: "World", kind: str = "") -> list[str]:
    """Keys of the objects of a kind."""
    return [key for key in world.store.keys if f"/k{kind}" in key]


def of_state(key: str) -> bool:
    """Whether a key is of a state."""
    return "/kstate" in key


def test_attention_is_shared_by_all_sizes_and_states_by_ranks(engines: "Callable[..., StateEngine]") -> None:
    """What the other tests here rest on."""
    one, two = engines("a", tp=2), engines("b", tp=4)
    decision = one.side.decision
    assert (decision.verdict.state, decision.verdict.reason) == ("shared", "Shared"), decision.verdict.message
    assert "kinds: full, state; states are read by members of TP 2 only" in decision.verdict.message
    assert [(kind.name, kind.ranks, kind.layers) for kind in decision.kinds] == [
        ("full", 0, (0, 3)),
        ("state", 2, (1, 2, 4, 5)),
    ]
    assert sorted(map(len, decision.groups)) == [1, 2]
    assert decision.namespace == two.side.decision.namespace
    full, state = (decision.kinds[n].name_in_keys for n in (0, 1))
    assert full == two.side.decision.kinds[0].name_in_keys
    assert state != two.side.decision.kinds[1].name_in_keys


LENGTHS = [3, 4, 5, 8, 9, 63, 64, 65, 67, 68, 69, 127, 128, 129, 150]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("tp", "writer", "reader"), [(1, "LBNHC", "LBHNC"), (2, "BLHNC", "LBNHC"), (4, "LBHNC", "BLNHC")]
)
def test_prompts_around_block_ends_are_found_by_an_engine_of_the_same_size(
    hybrid: "StateWorld", engines: "Callable[..., StateEngine]", tp: int, writer: str, reader: str, asynchronous: bool
) -> None:
    """Prompts of one to three steps; the reader's cache groups come in another order."""
    one = engines("a", tp=tp, layout=writer)
    two = engines("b", tp=tp, layout=reader, group_order=-1, asynchronous=asynchronous)
    for number, length in enumerate(LENGTHS):
        prompt, before = [number + 3, *PROMPT[1:length]], set(objects(hybrid, "state"))
        assert one.ask(prompt, max_tokens=3) == 0
        ends = {(hybrid.number(key) + 1) * BLOCK for key in objects(hybrid, "state") if key not in before}
        last = max((end for end in ends if end < length), default=0)
        # At whole blocks vLLM before 0.32 leaves the state of the prompt's own end behind only, which is one too many.
        assert last == (length - 1) // BLOCK * BLOCK or length % BLOCK == 0
        assert two.ask(prompt, max_tokens=9) == last
    assert hybrid.check_store() == len(objects(hybrid))
    assert one.used_blocks == two.used_blocks == 0


def test_members_of_another_size_find_nothing_and_share_the_attention_blocks(
    hybrid: "StateWorld", engines: "Callable[..., StateEngine]"
) -> None:
    """B14: a state is never taken for that of another rank. What both write of attention is written once."""
    one, two = engines("a", tp=2), engines("b", tp=4)
    one.ask(PROMPT, max_tokens=2)
    full = len(objects(hybrid, "full"))
    assert two.ask(PROMPT, max_tokens=2) == 0
    assert two.loads_planned == 0
    assert len(objects(hybrid, "full")) == full
    assert two.count("failed_loads") == two.count("failed_keys") == 0
    assert engines("c", tp=2).ask(PROMPT, max_tokens=20) == 37 * BLOCK
    assert engines("d", tp=4).ask(PROMPT, max_tokens=20) == 37 * BLOCK
    assert hybrid.check_store() == len(objects(hybrid))


def test_a_hit_ends_where_a_state_was_left_behind(hybrid: "StateWorld", engines: "Callable[..., StateEngine]") -> None:
    """A prompt in steps of 64 tokens has states at 64, 128 and its end; prompts that leave it in between use those."""
    engines("a", tp=2).ask(PROMPT)
    assert sorted({hybrid.number(key) for key in objects(hybrid, "state")}) == [15, 31, 36]
    assert len(objects(hybrid, "state")) == 3 * 2 * (LAYERS - 2)
    two = engines("b", tp=2)
    for length, found in ((150, 148), (148, 128), (129, 128), (128, 64), (100, 64), (64, 0), (40, 0)):
        assert two.pool.reset_prefix_cache()
        assert two.ask([*PROMPT[:length], 1, 2][:length], max_tokens=2) == found, length
    assert two.pool.reset_prefix_cache()
    assert two.ask([*PROMPT[:140], *range(3, 40)], max_tokens=2) == 128


def test_a_load_brings_one_state_and_all_blocks_of_attention(
    hybrid: "StateWorld", engines: "Callable[..., StateEngine]"
) -> None:
    """Keys are counted by kind; the state lies in the last block of each of its groups."""
    engines("a", tp=2).ask(PROMPT)
    two = engines("b", tp=2)
    assert two.ask(PROMPT) == 37 * BLOCK
    (plan,) = (plan for m in two.metadata for plan in m.step.loads)
    assert [(part.kind, part.numbers) for part in plan.blocks] == [("full", tuple(range(37))), ("state", (36,))]
    assert [len(part.tables) for part in plan.blocks] == [1, 2]
    assert plan.whole
    assert 0 not in plan.block_ids
    assert two.count("lookup_keys:full") == 37 * HEADS
    assert two.count("lookup_keys:state") == 2 * (LAYERS - 2)


def test_bytes_written_are_the_unique_bytes(hybrid: "StateWorld", engines: "Callable[..., StateEngine]") -> None:
    """Two engines and repeated prompts: every object goes to the store once."""
    one, two = engines("a", tp=2), engines("b", tp=2)
    for engine in (one, two, one):
        engine.ask(PROMPT, max_tokens=2)
    for engine in (one, two):
        assert engine.pool.reset_prefix_cache()
        engine.ask([*PROMPT, 5, 6, 7], max_tokens=2)
    total = sum(map(len, (hybrid.store.contents.objects[key] for key in objects(hybrid))))
    assert one.count("saved_bytes") + two.count("saved_bytes") == total


def test_states_of_an_answer_are_saved_at_the_ends_of_its_blocks(
    hybrid: "StateWorld", engines: "Callable[..., StateEngine]"
) -> None:
    """Decoded blocks too; another engine goes on from where the first one ended."""
    one, two = engines("a", tp=2), engines("b", tp=2)
    one.ask(PROMPT[:40], max_tokens=30)
    text = one.outputs["a-0"]
    assert {hybrid.number(key) for key in objects(hybrid, "state")} >= {9, 10, 12, 15}
    assert two.ask([*PROMPT[:40], *text], max_tokens=9) == 68
    assert hybrid.check_store() == len(objects(hybrid))


@pytest.mark.parametrize("part", ["s0p0", "s1p3"])
def test_a_state_that_has_left_the_store_moves_the_hit_to_the_one_before(
    hybrid: "StateWorld", engines: "Callable[..., StateEngine]", part: str
) -> None:
    """One layer of one rank is enough; no other object of the block is used."""
    engines("a", tp=2).ask(PROMPT)
    hybrid.store.evict(lambda key: of_state(key) and hybrid.number(key) == 36 and key.endswith(part))
    assert engines("b", tp=2).ask(PROMPT, max_tokens=5) == 128
    hybrid.store.evict(of_state)
    three = engines("c", tp=2)
    assert three.ask(PROMPT) == 0
    assert three.loads_planned == 0
    assert engines("d", tp=2).ask(PROMPT) == 37 * BLOCK
    assert hybrid.check_store() == len(objects(hybrid))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("bad", ["/kfull", "/kstate"])
def test_a_load_that_fails_is_computed_from_the_start(
    hybrid: "StateWorld", engines: "Callable[..., StateEngine]", bad: str, asynchronous: bool
) -> None:
    """D2: reported by request; nothing of the load is used, whichever kind it was that failed."""
    engines("a", tp=2).ask(PROMPT)
    two = engines("b", tp=2, asynchronous=asynchronous)
    two.faults.fail("get", codes.TRANSFER_FAIL, lambda key: bad in key and "s1p0" in key and hybrid.number(key) == 36)
    assert two.ask(PROMPT, max_tokens=9) == 0
    assert two.count("failed_loads") == two.loads_planned == 1
    assert two.used_blocks == 0
    two.faults.clear()
    assert hybrid.check_store() == len(objects(hybrid))


def test_a_state_is_pinned_until_it_is_saved(hybrid: "StateWorld", engines: "Callable[..., StateEngine]") -> None:
    """The store hangs while the engine goes on and others want the blocks that it no longer needs: bytes are right."""
    one = engines("a", tp=2, blocks=300, extra={"staging_bytes": 1 << 11})
    gate = one.faults.hang("put", of_state)
    one.add("r", PROMPT[:60], max_tokens=60)
    one.step_until(lambda: len(one.outputs["r"]) > 40)
    assert 0 < one.side._pins.blocks <= 15
    for number in range(6):
        one.add(f"s{number}", [number + 3] * 60, max_tokens=20)
    one.step_until(lambda: all(len(one.outputs[f"s{n}"]) == 20 for n in range(6)))
    gate.set()
    one.run()
    assert hybrid.check_store() == len(objects(hybrid)) > 0
    assert one.used_blocks == 0


def test_states_share_across_pipeline_sizes(hybrid: "StateWorld", engines: "Callable[..., StateEngine]") -> None:
    """A layer's state is an object of its own, so any cut of the layers holds whole ones."""
    extra = {"pipeline_parallel_sizes": [1, 2]}
    one, two = engines("a", tp=2, pp=2, extra=extra), engines("b", tp=2, pp=1, extra=extra)
    assert one.side.decision.verdict.state == "shared", one.side.decision.verdict
    one.ask(PROMPT, max_tokens=3)
    assert two.ask(PROMPT, max_tokens=9) == 37 * BLOCK
    hybrid.check_store()


def test_an_isolated_member_reads_what_it_has_stored_itself(engines: "Callable[..., StateEngine]") -> None:
    """A wrong configuration: rank-local objects of both kinds, under its own namespace."""
    one = engines("a", tp=2, extra={"store_tp_size": 3})
    assert one.side.decision.verdict.state == "isolated"
    one.ask(PROMPT, max_tokens=3)
    assert one.pool.reset_prefix_cache()
    assert one.ask(PROMPT, max_tokens=3) == 37 * BLOCK


def test_a_changed_byte_of_a_state_is_found_with_digests(
    hybrid: "StateWorld", engines: "Callable[..., StateEngine]"
) -> None:
    """Nothing of a load is used unless all of it is what was saved."""
    extra = {"verify": "checksum"}
    engines("a", tp=2, extra=extra).ask(PROMPT)
    torn = next(key for key in objects(hybrid, "state") if hybrid.number(key) == 36 and key.endswith("s1p2"))
    data = hybrid.store.contents.objects[torn]
    hybrid.store.contents.objects[torn] = bytes([data[0] ^ 1]) + data[1:]
    two = engines("b", tp=2, extra=extra)
    assert two.ask(PROMPT, max_tokens=3) == 0
    assert two.count("failed_loads") == 1


@pytest.mark.parametrize("mode", ["none", "all"])
def test_without_states_at_block_ends_nothing_is_cached(engines: "Callable[..., StateEngine]", mode: str) -> None:
    """Then the engine hands no state over, or keeps them by other rules."""
    try:
        verdict = engines("a", tp=2, mode=mode).side.decision.verdict
    except AssertionError as error:
        if "requires mamba_cache_mode" not in str(error):
            raise
        pytest.skip("this vLLM has no prefix cache of such states")
    assert (verdict.state, verdict.reason) == ("disabled", "SeveralKinds")
    assert f"mamba_cache_mode {mode} given, align expected" in verdict.message


def test_engines_whose_kernels_may_differ_do_not_meet(
    hybrid: "StateWorld", engines: "Callable[..., StateEngine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal shapes and sizes; some kernels turn the states round."""
    from kvshare_connector import compat

    engines("a", tp=2).ask(PROMPT)
    monkeypatch.setattr(compat, "state_kernels", lambda _: "others")
    assert engines("b", tp=2).ask(PROMPT) == 0
    assert hybrid.check_store() == len(objects(hybrid))


def test_engines_whose_states_round_otherwise_share_nothing(engines: "Callable[..., StateEngine]") -> None:
    """A4: what a state rounds off is missing in all that later layers cache."""
    import torch

    one, two = engines("a", tp=2), engines("b", tp=2, dtype=torch.int8)
    assert one.side.decision.verdict.state == two.side.decision.verdict.state == "shared"
    assert one.side.decision.namespace != two.side.decision.namespace
    assert dict(two.side.decision.manifest)["state_dtypes"] == "uint8+int8"


def test_a_session_with_streamed_input_ends_caching(engines: "Callable[..., StateEngine]") -> None:
    """A step that was under way has put the token that it takes back into the state, and nothing undoes that."""
    one = engines("a", tp=2)
    one.add("s", PROMPT[:9], resumable=True)
    for _ in range(5):
        one.step()
    verdict = one.side.decision.verdict
    assert (verdict.state, verdict.reason) == ("disabled", "StreamedInput")


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "mtp", "draft_model"])
def test_states_are_not_cached_with_speculation_of_any_kind(engines: "Callable[..., StateEngine]", method: str) -> None:
    """A4: vLLM 0.33 has models (KDA with ``--use-replayssm``) whose specification has no blocks for drafts.

    Neither the specification nor the fingerprint, which drafts from the text itself leave alone, tells such an engine
    from one that does not speculate.
    """
    verdict = engines("a", tp=2, change=drafting(method)).side.decision.verdict
    assert (verdict.state, verdict.reason) == ("disabled", "SeveralKinds"), verdict.message
    assert "together with speculative decoding" in verdict.message


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic(hybrid: "StateWorld", engines: "Callable[..., StateEngine]", seed: int) -> None:
    """C7, C13, D6: small caches, preemptions, aborts, evictions and store errors; all bytes are compared."""
    from disturbances import random_traffic

    dice = random.Random(seed)
    sizes = ((2, "LBNHC"), (2, "BLHNC")) if seed % 2 else ((4, "LBHNC"), (4, "BLNHC"))
    made = [
        engines(name, tp=tp, layout=layout, blocks=240, asynchronous=bool(seed & 2))
        for name, (tp, layout) in zip("ab", sizes, strict=True)
    ]

    def cut() -> tuple[int, int]:
        # Many prompts end where another one goes on, or states would never be found.
        return dice.choice([17, 29, 40]), dice.choice([0, 0, 5, 14])

    random_traffic(dice, hybrid, made, cut, evicted=0.05)
