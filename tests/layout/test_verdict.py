"""Verdict: one row per reason, and which facts separate namespaces."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout import checks
from kvshare_layout.config import Parsed, parse
from kvshare_layout.facts import EngineFacts, RankFacts
from kvshare_layout.keys import object_key, parse_object_key
from kvshare_layout.kinds import Retention
from kvshare_layout.objects import prove_tiling
from kvshare_layout.verdict import CHECKS, DISABLED, ISOLATED, SHARED, Decision, decide, held_objects
from strategies import IDENTITY, Pool, engine_facts, parsed, pools, rank_facts


def _decide(engine: EngineFacts, config: Parsed | None = None, **layer: object) -> Decision:
    return decide(config or parsed(store_tp_size=4), engine, rank_facts(engine, **layer))


def _base(**changes: object) -> EngineFacts:
    return engine_facts(2, 1, 8, 4, **changes)


@dataclass(frozen=True)
class Row:
    """One reason.

    Attributes:
        name: what is given, in words.
        state: expected state.
        reason: expected reason.
        said: texts that the message must have: what was given and what is expected.
        engine: facts of the engine.
        config: configuration.
        layer: changes of every layer.
        ranks: change of the ranks' facts.
    """

    name: str
    state: str
    reason: str
    said: tuple[str, ...]
    engine: EngineFacts = field(default_factory=_base)
    config: Parsed = field(default_factory=lambda: parsed(store_tp_size=4))
    layer: dict[str, object] = field(default_factory=dict)
    ranks: Callable[[tuple[RankFacts, ...]], tuple[RankFacts, ...]] = lambda r: r


def _two_geometries(ranks: tuple[RankFacts, ...]) -> tuple[RankFacts, ...]:
    return tuple(replace(r, layers=(*r.layers[:-1], replace(r.layers[-1], cell_bytes=132))) for r in ranks)


def _alternating(ranks: tuple[RankFacts, ...], groups: tuple[int, ...] = (0, 1)) -> tuple[RankFacts, ...]:
    """Every second layer has a window of 128 tokens; ``groups`` of the two kinds."""
    return tuple(
        replace(
            r,
            layers=tuple(
                replace(x, retention=Retention("window", 128), group=groups[1])
                if x.index % 2
                else replace(x, group=groups[0])
                for x in r.layers
            ),
        )
        for r in ranks
    )


ROWS = [
    Row("everything fits", SHARED, "Shared", ("4 Store shards", "1 Store stages")),
    Row("an engine without prefix caching", DISABLED, "NoPrefixCache", ("off",), _base(problem="NoPrefixCache: off")),
    Row(
        "a rank that cannot cache",
        DISABLED,
        "NoMemory",
        ("arena",),
        ranks=lambda r: (r[0], replace(r[1], problems=("NoMemory: no room for the arena",))),
    ),
    Row("a rank that is missing", DISABLED, "FactsInconsistent", ("[0]", "0 to 1"), ranks=lambda r: r[:1]),
    Row("decode context parallel", DISABLED, "ContextParallel", ("decode context parallel 2",), _base(dcp=2)),
    Row("prefill context parallel", DISABLED, "ContextParallel", ("prefill context parallel 2",), _base(pcp=2)),
    Row(
        "no layers with a cache",
        DISABLED,
        "NoKVCache",
        ("nothing to cache",),
        ranks=lambda r: tuple(replace(x, layers=()) for x in r),
    ),
    Row("a window", SHARED, "Shared", ("window of 128 tokens",), layer={"retention": Retention("window", 128)}),
    Row(
        "windows alone, beside another connector",
        DISABLED,
        "SeveralKinds",
        ("retention window", "beside another connector"),
        config=parsed(store_tp_size=4, inside_multi_connector=True),
        layer={"retention": Retention("window", 128)},
    ),
    Row(
        "windows beside full attention, beside another connector",
        SHARED,
        "Shared",
        ("kinds: full, window of 128 tokens",),
        _base(cache_groups=2),
        parsed(store_tp_size=4, inside_multi_connector=True),
        ranks=_alternating,
    ),
    Row(
        "windows beside full attention",
        SHARED,
        "Shared",
        ("4 Store shards", "kinds: full, window of 128 tokens"),
        _base(cache_groups=2),
        ranks=_alternating,
    ),
    Row(
        "a state",
        DISABLED,
        "SeveralKinds",
        ("retention state", "the name of another"),
        layer={"retention": Retention("state")},
    ),
    Row("another rule", DISABLED, "SeveralKinds", ("retention other",), layer={"retention": Retention("other")}),
    Row("a group without layers", DISABLED, "SeveralKinds", ("2 cache groups", "groups [0]"), _base(cache_groups=2)),
    Row(
        "windows and full attention in one group",
        DISABLED,
        "SeveralKinds",
        ("1 cache groups", "one kind"),
        ranks=lambda r: tuple(replace(x, layers=tuple(replace(y, group=0) for y in x.layers)) for x in _alternating(r)),
    ),
    Row(
        "windows whose caches have other cells",
        DISABLED,
        "SeveralKinds",
        ("2 cache geometries", "full, window"),
        _base(cache_groups=2),
        ranks=lambda r: tuple(
            replace(x, layers=tuple(replace(y, cell_bytes=256 << y.group) for y in x.layers)) for x in _alternating(r)
        ),
    ),
    Row("an extra indexer cache", DISABLED, "SeveralKinds", ("2 cache geometries",), ranks=_two_geometries),
    Row("finer hashes", DISABLED, "BlockMismatch", ("cover 8 tokens", "blocks 16"), _base(hash_block_tokens=8)),
    Row("other cache blocks", DISABLED, "BlockMismatch", ("blocks 16", "blocks 32"), layer={"block_tokens": 32}),
    Row(
        "an arena too small for shared objects",
        DISABLED,
        "StagingTooSmall",
        ("staging_bytes 131071 given", "objects of 32768 bytes", "at least 131072"),
        config=parsed(store_tp_size=4, staging_bytes=(128 << 10) - 1),
    ),
    Row(
        "an arena too small for shared objects with their digests",
        DISABLED,
        "StagingTooSmall",
        ("staging_bytes 131072 given", "objects of 32784 bytes", "at least 131328"),
        config=parsed(store_tp_size=4, staging_bytes=128 << 10, verify="checksum"),
    ),
    Row(
        "an arena too small for the whole pages of an isolated rank",
        DISABLED,
        "StagingTooSmall",
        ("objects of 65536 bytes", "raise staging_bytes"),
        config=replace(parse({"stor": 1}), config=parsed(staging_bytes=255 << 10).config),
    ),
    Row(
        "a malformed configuration",
        ISOLATED,
        "ConfigInvalid",
        ("store_tp_size: 'four' given", "expected", "stor: unknown key"),
        config=parse({"store_tp_size": "four", "stor": 1}),
    ),
    Row(
        "seeded hashes",
        ISOLATED,
        "HashNotReproducible",
        ("xxhash", "--prefix-caching-hash-algo sha256_cbor"),
        _base(hash_reproducible=False, hash_algorithm="xxhash"),
    ),
    Row(
        "another block size than the pool's",
        ISOLATED,
        "BlockMismatch",
        ("blocks of 16 tokens", "pool's 32", "--block-size 32"),
        config=parsed(store_tp_size=4, block_size_tokens=32),
    ),
    Row(
        "another hash algorithm than the pool's",
        ISOLATED,
        "HashMismatch",
        ("sha256_cbor", "pool's sha256", "--prefix-caching-hash-algo sha256"),
        config=parsed(store_tp_size=4, hash_algorithm="sha256"),
    ),
    Row(
        "weights without a digest",
        ISOLATED,
        "WeightsUnknown",
        ("random weights",),
        _base(weights_problem="random weights given, a checkpoint expected"),
    ),
    Row(
        "an encoding that mixes heads",
        ISOLATED,
        "EncodingNotSliceable",
        ("kv-packed", "use an attention backend"),
        layer={"sliceable": False},
    ),
    Row("another number of heads on a rank", ISOLATED, "HeadsMismatch", ("3 heads", "4 expected"), layer={"heads": 3}),
    Row(
        "scales beside the data",
        ISOLATED,
        "HeadsMismatch",
        ("8 heads", "4 expected", "8 KV heads and TP 2"),
        layer={"heads": 8},
    ),
    Row(
        "an S that does not divide H",
        ISOLATED,
        "StoreTPInvalid",
        ("Store TP 3 given", "8 KV heads expected"),
        config=parsed(store_tp_size=3),
    ),
    Row(
        "an S that is no multiple of the engine's TP",
        ISOLATED,
        "StoreTPInvalid",
        ("Store TP 1 given", "TP 2 expected", "add TP 2 to the pool"),
        config=parsed(store_tp_size=1),
    ),
    Row(
        "an S and an lcm that differ",
        ISOLATED,
        "StoreTPInvalid",
        ("store_tp_size 8", "lcm 4", "remove one of them"),
        config=parsed(store_tp_size=8, enable_store_tp_lcm=True, prefill_tp_sizes=(4, 2)),
    ),
    Row(
        "listed sizes that the model cannot have",
        ISOLATED,
        "StoreTPInvalid",
        ("TP 3 given for 8 KV heads",),
        config=parsed(enable_store_tp_lcm=True, prefill_tp_sizes=(3, 2)),
    ),
    Row(
        "a pipeline that the pool does not list",
        ISOLATED,
        "PPMismatch",
        ("Store stage 0", "list this pod's pipeline size"),
        engine_facts(2, 2, 8, 4),
        parsed(store_tp_size=4, pipeline_parallel_sizes=(1,)),
    ),
    Row(
        "stage boundaries beyond the model",
        ISOLATED,
        "PPMismatch",
        ("[99] given, 0 to 4 expected",),
        config=parsed(store_tp_size=4, stage_boundaries=(99,)),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_reason_says_what_was_given_and_expected(row: Row) -> None:
    """State, reason and message; only a disabled engine has no namespace."""
    decision = decide(row.config, row.engine, row.ranks(rank_facts(row.engine, **row.layer)))
    assert (decision.verdict.state, decision.verdict.reason) == (row.state, row.reason)
    for text in row.said:
        assert text in decision.verdict.message
    assert decision.caches == bool(decision.namespace) == bool(decision.objects) == (row.state != DISABLED)
    if row.state == ISOLATED:
        assert "/i-" in decision.namespace


def test_every_check_has_a_row() -> None:
    """A new check needs an example."""
    hit = set()
    for row in ROWS:
        case = checks.Case(row.config, row.engine, row.ranks(rank_facts(row.engine, **row.layer)))
        for number, (_, check) in enumerate(CHECKS):
            if check(case):
                hit.add(number)
                break
    assert hit == set(range(len(CHECKS)))


def test_the_state_of_a_check_never_gets_milder() -> None:
    """All that disable come before all that isolate."""
    states = [state for state, _ in CHECKS]
    assert states == sorted(states, key=[DISABLED, ISOLATED].index)


IDENTITIES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    **{f"identity {name}": ({"identity": {**IDENTITY, name: "other"}}, {}) for name in IDENTITY},
    "identity grows": ({"identity": {**IDENTITY, "new": None}}, {}),
    "block size": ({"block_tokens": 32, "hash_block_tokens": 32}, {"block_tokens": 32}),
    "hash algorithm": ({"hash_algorithm": "sha256"}, {}),
    "drafting": ({"draft_drop": True}, {}),
    "number of layers": ({"hidden_layers": 8}, {}),
    "number of heads": ({"kv_heads": 16}, {"heads": 8}),
    "cell encoding": ({}, {"encoding": "cpu-amx"}),
    "head size": ({}, {"cell_bytes": 128}),
}


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("isolated", [False, True])
def test_whatever_changes_bytes_or_keys_changes_the_namespace(name: str, isolated: bool) -> None:
    """One field at a time, shared or isolated (cases A2, A4, A8, A15, B8, B11)."""
    config = parsed(store_tp_size=4, hash_algorithm="sha256_cbor" if not isolated and name != "hash algorithm" else "")
    if isolated:
        config = Parsed(config.config, ("a mistake",))
    engine, layer = IDENTITIES[name]
    before, after = _decide(_base(), config), _decide(_base(**engine), config, **layer)
    assert before.verdict == after.verdict
    assert before.verdict.state == (ISOLATED if isolated else SHARED)
    assert before.fingerprint != after.fingerprint
    assert before.namespace != after.namespace


@pytest.mark.parametrize("isolated", [False, True])
def test_members_that_store_digests_never_meet_others(isolated: bool) -> None:
    """Their objects have other sizes; the default adds no field, so that its fingerprint stays."""
    settings = {"store_tp_size": 4, "hash_algorithm": "" if isolated else "sha256_cbor"}
    both = [parsed(**settings), parsed(**settings, verify="checksum")]
    if isolated:
        both = [Parsed(one.config, ("a mistake",)) for one in both]
    before, after = (_decide(_base(), one) for one in both)
    assert before.verdict == after.verdict
    assert before.namespace != after.namespace
    assert dict(after.manifest)["verify"] == "checksum"
    assert "verify" not in dict(before.manifest)
    assert before.objects == after.objects


def test_another_store_tp_or_other_stages_are_another_namespace() -> None:
    """Objects of another size never share a key."""
    configs = [
        parsed(store_tp_size=2),
        parsed(store_tp_size=4),
        parsed(store_tp_size=8),
        parsed(store_tp_size=4, stage_boundaries=(2,)),
        parsed(store_tp_size=4, pipeline_parallel_sizes=(1, 4)),
        parsed(store_tp_size=4, cache_namespace="kvs1/p-x/g1"),
        parsed(store_tp_size=4, cache_namespace="kvs1/p-x/g2"),
    ]
    namespaces = [_decide(_base(), config).namespace for config in configs]
    assert len(set(namespaces)) == len(configs)


def test_what_does_not_change_bytes_does_not_change_the_namespace() -> None:
    """TP size, ranks, layout, pipeline with common stages, instance, and how S was said (case A4)."""
    common = {"pipeline_parallel_sizes": (1, 2, 4)}
    seen = set()
    for tp, pp, layout in itertools.product((1, 2, 4), (1, 2, 4), ("LBHNC", "BLNHC", "other")):
        engine = engine_facts(tp, pp, 4, 4)
        for config in (
            parsed(store_tp_size=4, **common),
            parsed(store_tp_size=16, **common),
            parsed(enable_store_tp_lcm=True, prefill_tp_sizes=(4, 8), decode_tp_sizes=(2,), **common),
            parsed(
                store_tp_size=4, role="decode", save_decode_cache=True, staging_bytes=1 << 40, model_id="x", **common
            ),
        ):
            decision = _decide(engine, config, layout=layout)
            assert decision.verdict.state == SHARED
            seen.add((decision.namespace, decision.manifest, decision.objects))
    assert len(seen) == 1


@pytest.mark.parametrize("heads", [1, 2, 4, 6])
def test_tp_sizes_above_the_heads_share_as_well(heads: int) -> None:
    """MQA, MLA and replicated GQA are the same rule."""
    namespaces = set()
    for tp in (1, heads, 2 * heads, 4 * heads):
        decision = _decide(engine_facts(tp, 1, heads, 4), parsed(store_tp_size=4 * heads))
        assert decision.verdict.state == SHARED
        assert decision.store_tp == heads
        namespaces.add(decision.namespace)
    assert len(namespaces) == 1


def test_opaque_cells_share_where_there_is_one_head() -> None:
    """fp8 MLA needs no slicing."""
    assert _decide(engine_facts(4, 1, 1, 4), sliceable=False).verdict.state == SHARED


@pytest.mark.parametrize(
    "config",
    [
        parsed(store_tp_size=4),
        parsed(store_tp_size=3),
        parsed(store_tp_size=4, block_size_tokens=32),
        parse({"store_tp_size": "four"}),
    ],
    ids=["valid", "bad S", "pool mismatch", "malformed"],
)
@pytest.mark.parametrize("unknown", [{"weights_problem": "random"}, {"hash_reproducible": False}])
def test_engines_of_incomplete_identity_never_meet(config: Parsed, unknown: dict[str, object]) -> None:
    """Whatever reason comes first: equal manifests prove nothing then."""
    namespaces = {_decide(_base(instance=name, **unknown), config).namespace for name in ("one", "two", "three")}
    assert len(namespaces) == 3


def test_isolated_engines_of_equal_identity_and_topology_keep_their_cache_after_a_restart() -> None:
    """The namespace is private by what it says, not by chance."""
    config = parse({"store_tp_size": "four"})
    assert _decide(_base(instance="one"), config).namespace == _decide(_base(instance="two"), config).namespace


def test_isolated_namespaces_differ_by_topology_layout_reason_and_mistakes() -> None:
    """TP, PP, layout, heads; and two configurations that are wrong in different ways."""
    wrong = parse({"store_tp_size": "four"})
    decisions = [
        _decide(_base(), wrong),
        _decide(engine_facts(4, 1, 8, 4), wrong),
        _decide(engine_facts(2, 2, 8, 4), wrong),
        _decide(_base(), wrong, layout="BLNHC"),
        _decide(_base(), wrong, heads=8),
        _decide(_base(), parse({"store_tp_size": "five"})),
        _decide(_base(), parsed(store_tp_size=3)),
        _decide(_base(), parsed(store_tp_size=4)),
    ]
    assert len({decision.namespace for decision in decisions}) == len(decisions)


def test_an_isolated_engine_stores_one_opaque_object_per_rank() -> None:
    """Each rank its own, of its own size; together they are what a block has."""
    engine = engine_facts(2, 3, 8, 8)
    ranks = rank_facts(engine)
    decision = decide(parsed(store_tp_size=3), engine, ranks)
    held = [item for facts in ranks for item in held_objects(decision, facts)]
    assert [item.id.shard for item in held] == list(range(6))
    assert {item.id: item.size for item in held} == dict(decision.objects)
    prove_tiling(dict(decision.objects), held)


def test_a_disabled_engine_holds_nothing() -> None:
    """No objects to load or save."""
    engine = _base(dcp=2)
    decision = _decide(engine)
    assert not decision.caches
    assert all(held_objects(decision, facts) == () for facts in rank_facts(engine))


@given(pools(), st.lists(st.integers(1, 4), min_size=1, max_size=2), st.data())
def test_all_members_of_a_valid_pool_share_one_set_of_keys(
    pool: Pool, pipelines: list[int], data: st.DataObject
) -> None:
    """Whatever sizes the pool lists: one namespace, keys put by one engine are keys of every other (case A9)."""
    sizes, heads = pool.sizes, pool.kv_heads
    config = parsed(enable_store_tp_lcm=True, prefill_tp_sizes=sizes, pipeline_parallel_sizes=tuple(pipelines))
    found: set[tuple[str, frozenset[str]]] = set()
    for tp in set(sizes):
        for pp in set(pipelines):
            engine = engine_facts(tp, pp, heads, 4)
            ranks = data.draw(st.permutations(rank_facts(engine))) if tp * pp <= 8 else rank_facts(engine)
            decision = decide(config, engine, ranks)
            assert decision.verdict.state == SHARED, decision.verdict.message
            held = [item for facts in ranks for item in held_objects(decision, facts)]
            block = data.draw(st.integers(0, 9))
            written = [item.id for item in held if item.writes(block)]
            keys = [object_key(decision.namespace, b"hash", id_.kind, id_.shard, id_.stage) for id_ in written]
            assert len(keys) == len(set(keys)) == len(decision.objects)
            assert {parse_object_key(key)[3] for key in keys} == set(range(decision.store_tp))
            found.add((decision.namespace, frozenset(keys)))
    assert len(found) == 1


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(0, 14),
    st.booleans(),
    st.data(),
)
def test_any_topology_gets_a_verdict(
    tp: int, pp: int, heads: int, layers: int, store_tp: int, lcm: bool, data: st.DataObject
) -> None:
    """Sizes that vLLM would refuse included: never an exception, always a reason."""
    engine = engine_facts(tp, min(pp, layers), heads, layers)
    raw = {
        "store_tp_size": store_tp,
        "enable_store_tp_lcm": lcm,
        "prefill_tp_sizes": data.draw(st.lists(st.integers(1, 8), max_size=3)),
        "pipeline_parallel_sizes": data.draw(st.lists(st.integers(1, 8), max_size=2)),
        "stage_boundaries": data.draw(st.lists(st.integers(0, 8), max_size=2)),
    }
    decision = decide(parse(raw), engine, rank_facts(engine))
    assert decision.verdict.state in (SHARED, ISOLATED)
    assert decision.verdict.reason
    assert decision.verdict.message
    held = [item for facts in rank_facts(engine) for item in held_objects(decision, facts)]
    prove_tiling(dict(decision.objects), held)


def _hybrid(tp: int, pp: int = 1, *, groups: tuple[int, ...] = (0, 1), **changes: object) -> Decision:
    engine = engine_facts(tp, pp, 8, 6, cache_groups=2, **changes)
    config = parsed(store_tp_size=8, pipeline_parallel_sizes=(1, 2))
    return decide(config, engine, _alternating(rank_facts(engine), groups))


def test_kinds_are_named_by_what_they_are_whatever_the_engine_calls_its_groups() -> None:
    """Other TP and pipeline sizes, and groups in another order: one namespace, the same keys and objects."""
    decisions = [_hybrid(1), _hybrid(4), _hybrid(16), _hybrid(2, 2), _hybrid(2, groups=(1, 0))]
    assert len({(decision.namespace, decision.objects) for decision in decisions}) == 1
    assert [kind.name for kind in decisions[0].kinds] == ["full", "window128-"]
    assert [kind.layers for kind in decisions[0].kinds] == [(0, 2, 4), (1, 3, 5)]
    assert [decision.groups for decision in decisions[-2:]] == [((0,), (1,)), ((1,), (0,))]


def test_the_window_is_part_of_what_a_cache_is() -> None:
    """Two models that differ in the window, or in which layers have it, never meet; nor do they meet full attention."""
    engine = engine_facts(2, 1, 8, 6, cache_groups=2)
    ranks = _alternating(rank_facts(engine))
    other = tuple(
        replace(r, layers=tuple(replace(x, retention=Retention("window", 256)) if x.group else x for x in r.layers))
        for r in ranks
    )
    moved = tuple(
        replace(
            r, layers=tuple(replace(x, retention=Retention("full"), group=0) if x.index == 1 else x for x in r.layers)
        )
        for r in ranks
    )
    config = parsed(store_tp_size=8)
    plain = engine_facts(2, 1, 8, 6)
    found = [decide(config, engine, facts) for facts in (ranks, other, moved)]
    found.append(decide(config, plain, rank_facts(plain)))
    assert {decision.verdict.state for decision in found} == {SHARED}
    assert len({decision.namespace for decision in found}) == 4


def test_members_keep_the_fingerprint_they_had() -> None:
    """What is in the store of a pool of full attention, or of windows, is found by this release too."""
    assert _decide(_base()).fingerprint == "f0b20a6b6901ebd79090f817f66533d1"
    assert _hybrid(2).fingerprint == "caf13435a639a0a02f286da5b090ed9d"


def test_every_block_of_every_kind_is_covered_by_the_ranks() -> None:
    """Two kinds, pipeline stages and replicated heads: nothing is missing and nothing is written twice."""
    for tp, pp in ((1, 1), (4, 2), (16, 1)):
        decision = _hybrid(tp, pp)
        engine = engine_facts(tp, pp, 8, 6, cache_groups=2)
        held = [item for facts in _alternating(rank_facts(engine)) for item in held_objects(decision, facts)]
        for block in range(3):
            prove_tiling(dict(decision.objects), held, block)
        assert decision.whole


def test_an_isolated_engine_of_two_kinds_stores_an_opaque_object_per_rank_and_kind() -> None:
    """The same rule for members that keep to themselves; a rank without layers of a kind stores none of it."""
    engine = engine_facts(2, 3, 8, 3, cache_groups=2)
    ranks = _alternating(rank_facts(engine))
    decision = decide(parse({"store_tp_size": "four"}), engine, ranks)
    assert decision.verdict.state == ISOLATED
    held = [item for facts in ranks for item in held_objects(decision, facts)]
    assert [(i.id.kind, i.id.shard) for i in held] == [
        ("full", 0), ("full", 1), ("window128-", 2), ("window128-", 3), ("full", 4), ("full", 5),
    ]  # fmt: skip
    prove_tiling(dict(decision.objects), held)
