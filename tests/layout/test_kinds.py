"""Kinds: which blocks a hit rests on."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.kinds import FULL, Retention, needed, usable_blocks
from strategies import kind_of

hits = st.integers(0, 500)


@given(hits)
def test_full_attention_needs_all_blocks(blocks: int) -> None:
    """From the first to the last."""
    assert needed(kind_of(4, [0], block_tokens=16), blocks * 16) == range(blocks)


@given(hits, st.integers(1, 4096), st.integers(1, 64))
def test_a_window_needs_the_blocks_that_the_next_token_sees(blocks: int, window: int, tokens: int) -> None:
    """Token n attends to itself and the ``window - 1`` before it, counted one by one."""
    kind = replace(kind_of(4, [0], block_tokens=tokens), retention=Retention("window", window))
    hit = blocks * tokens
    seen = {token // tokens for token in range(max(0, hit - (window - 1)), hit)}
    found = set(needed(kind, hit))
    assert seen <= found
    assert len(found - seen) <= 1


@given(hits)
def test_a_state_needs_the_block_at_the_boundary(blocks: int) -> None:
    """Or none, when there is no hit."""
    kind = replace(kind_of(4, [0], block_tokens=16), retention=Retention("state"))
    assert list(needed(kind, blocks * 16)) == ([blocks - 1] if blocks else [])


@given(hits)
def test_drafting_gives_the_last_block_back(blocks: int) -> None:
    """Once, and never below zero (case B17)."""
    assert usable_blocks(blocks, draft_drop=False) == blocks
    assert usable_blocks(blocks, draft_drop=True) == max(0, blocks - 1)


def test_names_say_what_a_kind_is() -> None:
    """Two windows are two kinds."""
    names = {FULL.name, Retention("state").name, Retention("window", 8).name, Retention("window", 88).name}
    assert names == {"full", "state", "window8-", "window88-"}
