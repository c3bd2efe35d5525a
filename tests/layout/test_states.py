"""Recurrent states: an object for each layer and rank, beside attention that all sizes share, or the reason why not."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.facts import EngineFacts, RankFacts
from kvshare_layout.keys import object_key, parse_object_key
from kvshare_layout.kinds import Retention
from kvshare_layout.objects import prove_tiling
from kvshare_layout.verdict import DISABLED, ISOLATED, SHARED, Decision, decide, held_objects
from strategies import engine_facts, parsed, rank_facts

STATE: dict[str, Any] = {
    "retention": Retention("state"), "encoding": "state:gdn_attn:16x3:bfloat16", "sliceable": False, "heads": 1,
    "cell_bytes": 1000, "group": 1, "cache": "state",
}  # fmt: skip


def _engine(tp: int = 2, pp: int = 1, layers: int = 6, heads: int = 4, **changes: object) -> EngineFacts:
    return engine_facts(tp, pp, heads, layers, **{"cache_groups": 2, **changes})


def _has_state(layer: int) -> bool:
    return layer % 3 != 0


def _ranks(
    engine: EngineFacts, *, states: Any = None, has: Callable[[int], bool] = _has_state, bytes_by_tp: bool = True
) -> tuple[RankFacts, ...]:
    """Facts of ranks of which some layers have states, whose size follows from the TP size."""
    size = {"cell_bytes": 4800 // engine.tp} if bytes_by_tp else {}
    changes = {**STATE, **size, **(states or {})}
    return tuple(
        replace(r, layers=tuple(replace(x, **changes) if has(x.index) else x for x in r.layers))
        for r in rank_facts(engine)
    )


def _decide(engine: EngineFacts, config: dict[str, Any] | None = None, **changes: Any) -> Decision:
    return decide(parsed(**{"store_tp_size": 4, **(config or {})}), engine, _ranks(engine, **changes))


@dataclass(frozen=True)
class Row:
    """One reason: what is given in words, what the message must say, and how the facts differ."""

    name: str
    said: tuple[str, ...]
    engine: EngineFacts = field(default_factory=_engine)
    states: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    reason: str = "SeveralKinds"
    has: Callable[[int], bool] = _has_state
    ranks: Callable[[tuple[RankFacts, ...]], tuple[RankFacts, ...]] = lambda r: r


def _two_forms(ranks: tuple[RankFacts, ...]) -> tuple[RankFacts, ...]:
    return tuple(
        replace(r, layers=tuple(replace(x, encoding="state:other") if x.index == 2 else x for x in r.layers))
        for r in ranks
    )


ROWS = [
    Row(
        "states whose bytes nobody knows",
        ("the state of layer 1: mamba_cache_mode all given, align expected",),
        states={"encoding": "unknown:mamba_cache_mode all given, align expected"},
    ),
    Row("states alone", ("a model of states only",), _engine(cache_groups=1), {"group": 0}, has=lambda _: True),
    Row("beside another connector", ("another connector",), config={"inside_multi_connector": True}),
    Row("states of two forms", ("states of 2 forms",), ranks=_two_forms),
    Row("blocks of another size", ("blocks of [16, 32] tokens",), states={"block_tokens": 32}),
    Row("states that are called attention", ("layers [1, 2, 4, 5]", "the name of another"), states={"cache": ""}),
    Row("attention that is called a state", ("the name of another",), states={"retention": Retention("full")}),
    Row("states in the group of attention", ("one kind",), _engine(cache_groups=1), {"group": 0}),
    Row("speculative decoding", ("speculative decoding",), _engine(speculates=True)),
    Row("finer hashes", ("cover 8 tokens",), _engine(hash_block_tokens=8), reason="BlockMismatch"),
    Row("context parallelism", ("decode context parallel 2",), _engine(dcp=2), reason="ContextParallel"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_not_proven_is_not_cached(row: Row) -> None:
    """Nothing is stored, and the message says what was given."""
    ranks = row.ranks(_ranks(row.engine, states=row.states, has=row.has))
    verdict = decide(parsed(**{"store_tp_size": 4, **row.config}), row.engine, ranks).verdict
    assert (verdict.state, verdict.reason) == (DISABLED, row.reason)
    assert [text for text in row.said if text not in verdict.message] == [], verdict.message


def test_a_block_has_an_object_for_each_state_of_each_rank() -> None:
    """Beside the shards of attention; a lookup for one retention asks for its own objects only."""
    decision = _decide(_engine())
    assert decision.verdict.state == SHARED
    assert "full, state; states are read by members of TP 2 only" in decision.verdict.message
    (full, _), (state, groups) = decision.blocks
    assert (full.name, state.name, groups) == ("full", "state", (1,))
    assert [(o.shard, o.stage) for o in decision.objects_of(full)] == [(n, 0) for n in range(4)]
    assert [(o.shard, o.stage) for o in decision.objects_of(state)] == [(r, n) for r in range(2) for n in range(4)]
    assert {size for id_, size in decision.objects if id_ in decision.objects_of(state)} == {2400}
    held = [item for item in held_objects(decision, _ranks(_engine())[1]) if item.cache == "state"]
    assert {(item.id.shard, item.blocks, item.replicas) for item in held} == {(1, "state", 1)}
    assert decision.whole


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": _engine(4)},
        {"states": {"encoding": "state:other"}},
        {"states": {"cell_bytes": 2401}},
        {"engine": _engine(4), "bytes_by_tp": False},
    ],
)
def test_states_of_another_size_or_form_have_other_names(changes: dict[str, Any]) -> None:
    """B14: they never meet, also where their bytes are as many; attention is found by both."""
    engine = changes.pop("engine", _engine())
    one, other = _decide(_engine(), bytes_by_tp=changes.get("bytes_by_tp", True)), _decide(engine, **changes)
    assert one.namespace == other.namespace
    names = [{id_.kind for id_, _ in decision.objects} for decision in (one, other)]
    assert names[0] & names[1] == {"full"}


def test_blocks_that_the_engine_made_as_large_as_a_state_are_not_another_pool() -> None:
    """The pool says 16 tokens, the engine needs more; fewer than it was told are another matter, as without states."""
    large = {"block_tokens": 544, "hash_block_tokens": 544}
    one = decide(parsed(store_tp_size=4, block_size_tokens=16), _engine(**large), _ranks(_engine(**large)))
    assert one.verdict.state == SHARED
    assert one.namespace != _decide(_engine()).namespace
    for engine, ranks in ((_engine(), _ranks(_engine())), (_engine(cache_groups=1), rank_facts(_engine()))):
        verdict = decide(parsed(store_tp_size=4, block_size_tokens=32), engine, ranks).verdict
        assert (verdict.state, verdict.reason) == (ISOLATED, "BlockMismatch")
    plain = engine_facts(2, 1, 4, 6, **large)
    assert decide(parsed(store_tp_size=4, block_size_tokens=16), plain, rank_facts(plain)).verdict.state == ISOLATED


def test_which_layers_have_states_is_part_of_the_identity() -> None:
    """And so is the size of their blocks, and whether there are any."""
    decisions = [
        _decide(_engine()),
        _decide(_engine(), has=lambda layer: layer in (1, 2, 4)),
        _decide(_engine(cache_groups=1), has=lambda _: False),
    ]
    assert {decision.verdict.state for decision in decisions} == {SHARED}
    assert len({decision.namespace for decision in decisions}) == len(decisions)


def test_keys_of_states_are_read_back() -> None:
    """The name ends in no digit, so nothing of it is taken for a shard; the longest one fits."""
    decision = _decide(_engine(128, heads=128, layers=6), {"store_tp_size": 128})
    (kind,) = (kind.name_in_keys for kind in decision.kinds if kind.ranks)
    assert kind.startswith("state-tp128-")
    assert parse_object_key(object_key(decision.namespace, b"hash", kind, 127, 3))[2:] == (kind, 127, 3)


@given(
    st.sets(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3),
    st.sets(st.sampled_from([1, 2, 3]), min_size=1),
    st.sampled_from([1, 2, 4, 24]),
    st.sets(st.integers(1, 6)),
    st.data(),
)
def test_all_topologies_share_attention_and_write_every_state_once(
    sizes: set[int], pipelines: set[int], heads: int, states: set[int], data: st.DataObject
) -> None:
    """Any TP sizes and pipelines, states in any of seven layers but the first; one namespace."""
    sizes = {tp for tp in sizes if tp % heads == 0 or heads % tp == 0} or {1}
    config = parsed(enable_store_tp_lcm=True, prefill_tp_sizes=tuple(sizes), pipeline_parallel_sizes=tuple(pipelines))
    attention: set[frozenset[str]] = set()
    of_ranks: dict[int, set[frozenset[str]]] = {}
    for tp in sizes:
        for pp in pipelines:
            engine = _engine(tp, pp, 7, heads, cache_groups=2 if states else 1)
            ranks = _ranks(engine, has=lambda layer: layer in states)
            decision = decide(config, engine, data.draw(st.permutations(ranks)) if len(ranks) <= 8 else ranks)
            assert decision.verdict.state == SHARED, decision.verdict.message
            block = data.draw(st.integers(0, 40))
            held = [item for facts in ranks for item in held_objects(decision, facts)]
            prove_tiling(dict(decision.objects), held, block)
            written = [item.id for item in held if item.writes(block)]
            keys = [object_key(decision.namespace, b"hash", id_.kind, id_.shard, id_.stage) for id_ in written]
            assert len(keys) == len(set(keys)) == len(decision.objects)
            mine = frozenset(key for key in keys if "/kstate" in key)
            assert len(mine) == tp * len(states)
            of_ranks.setdefault(tp, set()).add(mine)
            attention.add(frozenset(keys) - mine)
    assert len(attention) == 1
    assert {len(found) for found in of_ranks.values()} == {1}
    found = [keys for (keys,) in of_ranks.values() if keys]
    assert len(set().union(*found)) == sum(map(len, found))


def test_an_isolated_engine_stores_an_opaque_object_per_rank_and_kind() -> None:
    """The same rule for members that keep to themselves."""
    decision = _decide(_engine(), {"hash_algorithm": "sha256"})
    assert decision.verdict.state == ISOLATED
    held = [item for facts in _ranks(_engine()) for item in held_objects(decision, facts)]
    assert [(item.cache, item.id.shard, item.size) for item in held] == [
        ("", 0, 2 * 2 * 16 * 256), ("state", 0, 4 * 2400), ("", 1, 2 * 2 * 16 * 256), ("state", 1, 4 * 2400),
    ]  # fmt: skip
    prove_tiling(dict(decision.objects), held)
