"""Indexers: layers with two caches in one cache group share when both are known, and else say why not."""

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

LATENT: dict[str, Any] = {"encoding": "mla-latent:bfloat16:576+0", "cell_bytes": 1152}
PACKED = "opaque:FLASHMLA_SPARSE:uint8:576+0:fp8_ds_mla:656"
KEYS: dict[str, Any] = {"encoding": "indexer-pages:fp8:132:64", "cell_bytes": 132, "cache": "indexer"}


def _engine(tp: int = 2, pp: int = 1, layers: int = 4, **changes: object) -> EngineFacts:
    return engine_facts(tp, pp, 1, layers, **changes)


def _ranks(
    engine: EngineFacts, *, indexed: Callable[[int], bool] = lambda _: True, keys: Any = None, latent: Any = None
) -> tuple[RankFacts, ...]:
    """Facts of ranks whose layers have a latent, and keys beside it where ``indexed`` says so."""
    ranks = rank_facts(engine, **{**LATENT, **(latent or {})})
    return tuple(
        replace(
            r,
            layers=tuple(
                cache
                for x in r.layers
                for cache in (x, replace(x, name=f"{x.name}.indexer", **{**KEYS, **(keys or {})}))
                if not cache.cache or indexed(cache.index)
            ),
        )
        for r in ranks
    )


def _decide(engine: EngineFacts, **changes: Any) -> Decision:
    return decide(parsed(store_tp_size=1), engine, _ranks(engine, **changes))


@dataclass(frozen=True)
class Row:
    """One reason: what is given in words, what the message must say, and how the facts differ."""

    name: str
    said: tuple[str, ...]
    engine: EngineFacts = field(default_factory=_engine)
    keys: dict[str, Any] = field(default_factory=dict)
    latent: dict[str, Any] = field(default_factory=dict)
    reason: str = "SeveralKinds"
    ranks: Callable[[tuple[RankFacts, ...]], tuple[RankFacts, ...]] = lambda r: r


def _without_latent(ranks: tuple[RankFacts, ...]) -> tuple[RankFacts, ...]:
    return tuple(replace(r, layers=tuple(x for x in r.layers if x.cache or x.index != 2)) for r in ranks)


def _two_forms(ranks: tuple[RankFacts, ...]) -> tuple[RankFacts, ...]:
    other = "indexer-pages:fp8:132:32"
    return tuple(
        replace(r, layers=tuple(replace(x, encoding=other) if x.cache and x.index == 2 else x for x in r.layers))
        for r in ranks
    )


def _other_rank(ranks: tuple[RankFacts, ...]) -> tuple[RankFacts, ...]:
    changed = tuple(replace(x, cell_bytes=68) if x.cache else x for x in ranks[1].layers)
    return (ranks[0], replace(ranks[1], layers=changed))


ROWS = [
    Row(
        "keys whose bytes nobody knows",
        ("2 cache geometries", "the indexer of layer 0: platform rocm given, cuda expected"),
        keys={"encoding": "unknown:platform rocm given, cuda expected", "sliceable": False},
    ),
    Row("keys in a group of their own", ("one cache group", "2 groups given"), _engine(cache_groups=2)),
    Row("attention with several heads", ("one latent head, 2 KV heads",), engine_facts(2, 1, 2, 4)),
    Row("keys cut by heads", ("one latent head", "[1, 2] on a rank"), keys={"heads": 2}),
    Row("attention whose cells nobody knows", ("beside latents", "unknown:NEW"), latent={"encoding": "unknown:NEW"}),
    Row("attention that is no latent", ("beside latents", "kv-packed"), latent={"encoding": "kv-packed:float16:64+64"}),
    Row("an opaque cache that is no latent", ("beside latents",), latent={"encoding": "opaque:TURBO:uint8:64+64:100"}),
    Row("other blocks", ("blocks of 8 tokens", "the same blocks expected"), keys={"block_tokens": 8}),
    Row("blocks of another group", ("in group 1", "in group 0"), keys={"group": 1}),
    Row("windows", ("beside full attention", "window"), latent={"retention": Retention("window", 64)}),
    Row("compressed keys", ("other", "nothing is known"), keys={"retention": Retention("other")}),
    Row("keys without attention", ("layer 2 has no attention",), ranks=_without_latent),
    Row("keys of two forms", ("indexers of 2 forms",), ranks=_two_forms),
    Row("keys that differ by rank", ("ranks 1 and 0 disagree",), reason="FactsInconsistent", ranks=_other_rank),
    Row("finer hashes", ("cover 8 tokens",), _engine(hash_block_tokens=8), reason="BlockMismatch"),
    Row("context parallelism", ("decode context parallel 2",), _engine(dcp=2), reason="ContextParallel"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_not_proven_is_not_cached(row: Row) -> None:
    """Nothing is stored, and the message says what was given."""
    ranks = row.ranks(_ranks(row.engine, keys=row.keys, latent=row.latent))
    verdict = decide(parsed(store_tp_size=1), row.engine, ranks).verdict
    assert (verdict.state, verdict.reason) == (DISABLED, row.reason)
    assert [text for text in row.said if text not in verdict.message] == [], verdict.message


@pytest.mark.parametrize("latent", [LATENT, {"encoding": PACKED, "cell_bytes": 656, "sliceable": False}])
def test_two_kinds_in_one_group(latent: dict[str, Any]) -> None:
    """Named by what they are, each with its own geometry; a load of them may be shortened block by block."""
    decision = _decide(_engine(), latent=latent)
    assert decision.verdict.state == SHARED
    assert "kinds: full, indexer" in decision.verdict.message
    assert [(k.name, k.encoding, k.cell_bytes, k.kv_heads) for k in decision.kinds] == [
        ("full", latent["encoding"], latent["cell_bytes"], 1), ("indexer", KEYS["encoding"], 132, 1),
    ]  # fmt: skip
    assert [id_.kind for id_, _ in decision.objects] == ["full", "indexer"]
    assert [size for _, size in decision.objects] == [4 * 16 * latent["cell_bytes"], 4 * 16 * 132]
    assert decision.groups == ((0,), (0,))
    assert not decision.whole


def test_the_engine_has_one_kind_of_blocks_with_the_objects_of_both() -> None:
    """A lookup asks for both, a block that lacks one is missing."""
    decision = _decide(_engine())
    ((kind, groups),) = decision.blocks
    assert (kind.name, groups) == ("full", (0,))
    assert [id_.kind for id_ in decision.objects_of(kind)] == ["full", "indexer"]
    held = held_objects(decision, _ranks(_engine())[0])
    assert {item.blocks for item in held} == {"full"}


def test_what_the_keys_are_is_part_of_the_identity() -> None:
    """Other pages, keys in other layers, no keys, or another latent: nobody meets."""
    decisions = [
        _decide(_engine()),
        _decide(_engine(), keys={"encoding": "indexer-pages:fp8:132:32"}),
        _decide(_engine(), indexed=lambda layer: layer != 2),
        _decide(_engine(), indexed=lambda _: False),
        _decide(_engine(), latent={"encoding": PACKED}),
    ]
    assert {decision.verdict.state for decision in decisions} == {SHARED}
    assert len({decision.namespace for decision in decisions}) == len(decisions)


def test_latents_without_indexers_keep_the_fingerprint_they_had() -> None:
    """What is in the store of a pool of latents is found by this release too."""
    assert _decide(_engine(), indexed=lambda _: False).fingerprint == "be421f188ff6befa79f44673f8a6b784"


def test_keys_of_an_indexer_are_read_back() -> None:
    """The name ends in no digit, so nothing of it is taken for a shard."""
    decision = _decide(_engine())
    key = object_key(decision.namespace, b"hash", "indexer", 0, 3)
    assert key.endswith("/kindexers0p3")
    assert parse_object_key(key)[2:] == ("indexer", 0, 3)


def test_facts_with_two_caches_of_a_layer_travel_as_json() -> None:
    """Each cache is a record of its own."""
    (facts, _) = _ranks(_engine())
    assert RankFacts.from_json(facts.to_json()) == facts
    assert [(x.index, x.kind) for x in facts.layers[:3]] == [(0, "full"), (0, "indexer"), (1, "full")]


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3),
    st.sets(st.sampled_from([1, 2, 3]), min_size=1),
    st.sets(st.integers(0, 6), min_size=1),
    st.data(),
)
def test_all_topologies_share_the_same_objects_and_write_them_once(
    sizes: list[int], pipelines: set[int], without: set[int], data: st.DataObject
) -> None:
    """Any TP sizes and pipelines, keys in any of seven layers: one namespace, each object of a block from one rank."""
    indexed = lambda layer: layer == 6 or layer not in without  # noqa: E731
    config = parsed(enable_store_tp_lcm=True, prefill_tp_sizes=tuple(sizes), pipeline_parallel_sizes=tuple(pipelines))
    found: set[tuple[str, frozenset[str]]] = set()
    for tp in set(sizes):
        for pp in pipelines:
            engine = _engine(tp, pp, 7)
            ranks = _ranks(engine, indexed=indexed)
            decision = decide(config, engine, data.draw(st.permutations(ranks)) if len(ranks) <= 8 else ranks)
            assert decision.verdict.state == SHARED, decision.verdict.message
            block = data.draw(st.integers(0, 40))
            held = [item for facts in ranks for item in held_objects(decision, facts)]
            prove_tiling(dict(decision.objects), held, block)
            written = [item.id for item in held if item.writes(block)]
            keys = [object_key(decision.namespace, b"hash", id_.kind, id_.shard, id_.stage) for id_ in written]
            assert len(keys) == len(set(keys)) == len(decision.objects)
            found.add((decision.namespace, frozenset(keys)))
    assert len(found) == 1


def test_an_isolated_engine_stores_an_opaque_object_per_rank_and_kind() -> None:
    """The same rule for members that keep to themselves; a stage without indexers stores none of their keys."""
    engine = _engine(2, 2)
    ranks = _ranks(engine, indexed=lambda layer: layer < 2)
    decision = decide(parsed(store_tp_size=1, hash_algorithm="sha256"), engine, ranks)
    assert decision.verdict.state == ISOLATED
    held = [item for facts in ranks for item in held_objects(decision, facts)]
    assert [(i.id.kind, i.id.shard) for i in held] == [
        ("full", 0), ("indexer", 0), ("full", 1), ("indexer", 1), ("full", 2), ("full", 3),
    ]  # fmt: skip
    prove_tiling(dict(decision.objects), held)
