"""Facts: they travel as JSON, and contradictions between ranks are found."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.errors import LayoutError
from kvshare_layout.facts import LayerFacts, RankFacts, check_ranks
from kvshare_layout.kinds import Retention
from strategies import engine_facts, rank_facts

layers = st.builds(
    LayerFacts,
    st.text(max_size=8),
    st.integers(0, 200),
    st.builds(Retention, st.sampled_from(["full", "window", "state"]), st.integers(0, 9999)),
    st.text(max_size=8),
    st.booleans(),
    st.integers(0, 128),
    st.integers(0, 4096),
    st.integers(1, 256),
    st.sampled_from(["LBHNC", "other"]),
)
ranks = st.builds(
    RankFacts,
    st.integers(0, 64),
    st.integers(0, 64),
    st.integers(0, 64),
    st.lists(layers, max_size=4).map(tuple),
    st.lists(st.text(max_size=20), max_size=3).map(tuple),
)


@given(ranks)
def test_facts_are_read_back_as_they_were_sent(facts: RankFacts) -> None:
    """One line of JSON."""
    text = facts.to_json()
    assert "\n" not in text
    assert RankFacts.from_json(text) == facts


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 3), (2, 2), (3, 4)])
def test_complete_facts_in_any_order_are_accepted(tp: int, pp: int) -> None:
    """The handshake gives them in no order."""
    engine = engine_facts(tp, pp, 12, 8)
    check_ranks(engine, rank_facts(engine)[::-1])


def test_the_layout_may_differ_between_ranks() -> None:
    """It is no part of the canonical form."""
    engine = engine_facts(2, 1, 4, 2)
    first, second = rank_facts(engine)
    second = replace(second, layers=tuple(replace(layer, layout="BLNHC") for layer in second.layers))
    check_ranks(engine, (first, second))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda r: r[:-1], "all of 0 to 3 once expected"),
        (lambda r: (*r, r[0]), "all of 0 to 3 once expected"),
        (lambda r: (*r[:3], replace(r[3], tp_rank=0)), "rank 3 says TP rank 0"),
        (lambda r: (*r[:3], replace(r[3], layers=r[3].layers[:1])), "different numbers of layers"),
        (lambda r: (*r[:3], replace(r[3], layers=r[0].layers)), "disagree about layer"),
        (lambda r: (r[0], r[1], *(replace(x, layers=r[0].layers) for x in r[2:])), "held by two pipeline ranks"),
        (
            lambda r: (r[0], replace(r[1], layers=tuple(replace(x, cell_bytes=1) for x in r[1].layers)), *r[2:]),
            "ranks 1 and 0 disagree about layer layers.0",
        ),
    ],
)
def test_contradictions_are_named(spoil: object, said: str) -> None:
    """By rank and layer."""
    engine = engine_facts(2, 2, 4, 4)
    with pytest.raises(LayoutError, match=said):
        check_ranks(engine, spoil(rank_facts(engine)))  # type: ignore[operator]
