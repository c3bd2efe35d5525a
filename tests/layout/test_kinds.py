"""Kinds: which blocks a hit rests on."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.kinds import FULL, Kind, Retention, Unknown, longest_hit, needed, usable_blocks
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


def _kinds(tokens: int, full: bool, windows: list[int]) -> list[Kind]:
    rules = [*([FULL] if full else []), *(Retention("window", window) for window in windows)]
    return [replace(kind_of(4, [0], block_tokens=tokens), name=r.name, retention=r) for r in rules]


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 8),
    st.booleans(),
    st.lists(st.integers(1, 80), max_size=3, unique=True),
    st.integers(0, 2),
    st.data(),
)
def test_the_longest_hit_is_what_trying_every_length_gives(
    blocks: int, have: int, tokens: int, full: bool, windows: list[int], spare: int, data: st.DataObject
) -> None:
    """Prompts shorter than, equal to and several times the window, whatever is missing, with and without drafting."""
    kinds = _kinds(tokens, full, windows)
    have = min(have, blocks)
    places = st.tuples(st.sampled_from([kind.name for kind in kinds] or ["none"]), st.integers(0, max(0, blocks - 1)))
    missing = data.draw(st.sets(places, max_size=10))

    def valid(end: int) -> bool:
        rests_on = {(kind.name, n) for kind in kinds for n in needed(kind, end * tokens) if n >= have}
        return end <= have or not rests_on & missing

    expected = max(
        (end for end in range(have, blocks + 1) if all(valid(end - less) for less in range(spare + 1))), default=have
    )
    found = longest_hit(kinds, blocks, lambda kind, n: (kind.name, n) not in missing, have=have, spare=spare)
    assert found == expected


def test_hits_around_a_window_and_its_blocks() -> None:
    """A window of 8 tokens and blocks of 4: block 3 of the window is gone, so 4 and 5 blocks are no hit and 6 are."""
    full, window = _kinds(4, True, [8])
    for prompt, expected in ((3, 3), (4, 3), (5, 3), (6, 6), (7, 7)):
        assert longest_hit([full, window], prompt, lambda kind, n: kind is full or n != 3) == expected
    # A window of one block and one token looks at one block; of one token more, at two.
    assert [list(needed(_kinds(4, False, [w])[0], 24)) for w in (1, 2, 5, 6)] == [[], [5], [5], [4, 5]]
    # So do the windows of hits that are shorter by a block, all together; a window of one token still at none.
    assert [list(needed(_kinds(4, False, [w])[0], 24, spare=1)) for w in (1, 2, 6)] == [[], [4, 5], [3, 4, 5]]


def test_a_search_says_what_it_must_know_first() -> None:
    """Nothing is taken for present or missing before somebody has looked."""
    full, window = _kinds(4, True, [8])
    seen: dict[tuple[str, int], bool] = {}
    asked: list[tuple[str, int]] = []
    while isinstance(found := longest_hit([full, window], 3, lambda kind, n: seen.get((kind.name, n))), Unknown):
        asked.append((found.kind.name, found.number))
        seen[asked[-1]] = True
    assert found == 3
    assert asked == [("full", 0), ("full", 1), ("full", 2), ("window8-", 2), ("window8-", 1)]
