"""Saves: which blocks, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.scheduler.saves import Offered, SaveRule, Saves
from one_kind import full

HASHES = [bytes([i]) for i in range(40)]
BOTH = SaveRule(prompt=True, decode=True)


def _next(saves: Saves, ready: int, *, prompt: int = 160, known: int = 40) -> list[int]:
    return saves.next_blocks("r", ready_tokens=ready, prompt_tokens=prompt, hashes=HASHES[:known])


@pytest.mark.parametrize(
    ("role", "decode", "kv_role", "expected"),
    [
        ("prefill", False, "kv_both", (True, False)),
        ("prefill", True, "kv_both", (True, False)),
        ("both", False, "kv_both", (True, False)),
        ("both", True, "kv_both", (True, True)),
        ("decode", False, "kv_consumer", (False, False)),
        ("decode", True, "kv_consumer", (True, True)),
        ("both", True, "kv_producer", (True, False)),
        ("decode", True, "kv_producer", (True, False)),
    ],
)
def test_roles(role: str, decode: bool, kv_role: str, expected: tuple[bool, bool]) -> None:
    """The table of roles."""
    rule = SaveRule.of(role, decode, kv_role)
    assert (rule.prompt, rule.decode) == expected


@given(st.lists(st.integers(0, 160), max_size=20), st.integers(0, 40))
def test_each_complete_and_hashed_block_comes_once(ready: list[int], known: int) -> None:
    """Whatever the steps: never an incomplete block, never one without a hash, never twice."""
    saves = Saves(BOTH, 4, Offered())
    seen: list[int] = []
    for tokens in ready:
        seen += _next(saves, tokens, known=known)
    assert seen == list(range(min(max(ready, default=0) // 4, known)))


def test_a_draft_that_was_rejected_is_not_saved() -> None:
    """C9: drafts have no hash and do not count as ready; the block comes when its last token is accepted."""
    saves = Saves(BOTH, 4, Offered())
    assert _next(saves, 7, known=1) == [0]
    assert _next(saves, 8, known=1) == []
    assert _next(saves, 8, known=2) == [1]


def test_a_block_with_one_decoded_token_is_a_decode_block() -> None:
    """The prompt ends inside it."""
    assert _next(Saves(SaveRule(True, False), 4, Offered()), 16, prompt=10) == [0, 1]
    assert _next(Saves(SaveRule(False, True), 4, Offered()), 16, prompt=10) == [2, 3]


def test_what_was_offered_is_not_offered_again_unless_it_did_not_arrive() -> None:
    """D14: one key is never in two jobs of an engine."""
    offered = Offered()
    saves = Saves(BOTH, 4, offered)
    job = saves.job(full(_next(saves, 8), HASHES[:2], [5, 6]))
    assert job.block_hashes == frozenset(HASHES[:2])
    assert job.block_ids == (5, 6)
    assert not any(saves.wanted(h, "full") for h in HASHES[:2])
    assert all(saves.wanted(h, "window8-") for h in HASHES[:2])
    offered.discard([HASHES[1]])
    assert [saves.wanted(h, "full") for h in HASHES[:3]] == [False, True, True]
    saves.rewind("r")
    assert _next(saves, 12) == [0, 1, 2]


def test_kinds_are_offered_each_for_itself() -> None:
    """What was offered of a window says nothing about full attention, nor the other way round."""
    offered = Offered()
    offered.add(HASHES[:2], frozenset({"full"}))
    offered.add(HASHES[1:3], frozenset({"window8-"}))
    assert [offered.has(h, "full") for h in HASHES[:4]] == [True, True, False, False]
    assert [offered.has(h, "window8-") for h in HASHES[:4]] == [False, True, True, False]
    offered.discard(HASHES[1:2])
    assert not offered.has(HASHES[1], "full")
    assert not offered.has(HASHES[1], "window8-")


def test_blocks_without_room_come_again() -> None:
    """F5: the pins of the last step are gone in the next."""
    saves = Saves(BOTH, 4, Offered())
    assert _next(saves, 16) == [0, 1, 2, 3]
    saves.job(full([0, 1], HASHES[:2], [5, 6]))
    saves.put_back("r", 2)
    assert _next(saves, 17) == [2, 3]


def test_a_reset_starts_a_new_epoch_and_offers_everything() -> None:
    """C10: jobs of the old epoch are recognised."""
    saves = Saves(BOTH, 4, Offered())
    old = saves.job(full(_next(saves, 8), HASHES[:2], [5, 6]))
    saves.reset()
    assert all(saves.wanted(h, "full") for h in HASHES[:2])
    new = saves.job(full(_next(saves, 8), HASHES[:2], [5, 6]))
    assert (old.epoch, new.epoch) == (0, 1)
    assert old.job_id != new.job_id


def test_memory_of_what_was_offered_is_bounded() -> None:
    """The oldest is forgotten, which costs one more PUT."""
    offered = Offered(limit=3)
    kinds = frozenset({"full"})
    offered.add(HASHES[:3], kinds)
    offered.add(HASHES[:1], kinds)
    offered.add(HASHES[3:4], kinds)
    assert [offered.has(h, "full") for h in HASHES[:4]] == [True, False, True, True]
    offered.clear()
    assert not offered.has(HASHES[0], "full")
