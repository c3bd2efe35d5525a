"""Verdict: may this engine share, must it keep to itself, or must it not cache at all?

Pure: an ordered table of named checks over plain values, each giving a reason and a message. The scheduler process
decides once and sends the decision to the ranks; ranks compute neither verdict nor namespace.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from kvshare_layout import keys
from kvshare_layout.config import ConnectorConfig, Parsed
from kvshare_layout.errors import LayoutError
from kvshare_layout.facts import EngineFacts, LayerFacts, RankFacts, check_ranks
from kvshare_layout.fingerprint import fingerprint, flatten
from kvshare_layout.heads import effective_tp, normalise_store_tp, resolve_store_tp, tp_problem
from kvshare_layout.kinds import Kind
from kvshare_layout.objects import (
    HeldObject,
    ObjectId,
    isolated_object,
    object_bytes,
    object_ids,
    prove_tiling,
    shared_objects,
)
from kvshare_layout.stages import Stage, common_boundaries, stages_of

SHARED, ISOLATED, DISABLED = "shared", "isolated", "disabled"


@dataclass(frozen=True)
class Verdict:
    """State, CamelCase reason and one sentence."""

    state: str
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """What an engine does, decided once.

    Attributes:
        verdict: the verdict.
        prefix: pool prefix.
        namespace: prefix of all keys; empty when disabled.
        fingerprint: digest of ``manifest``; empty when disabled.
        manifest: the fields behind the fingerprint, flattened to text.
        store_tp: S in use; 0 when disabled.
        kv_heads: total KV heads.
        kinds: the kinds, at most one today.
        stages: Store stages of the kind.
        tp: tensor-parallel size of the engine.
        objects: every object that a block has, with its bytes.
        draft_drop: see ``kinds.usable_blocks``.
    """

    verdict: Verdict
    prefix: str
    namespace: str = ""
    fingerprint: str = ""
    manifest: tuple[tuple[str, str], ...] = ()
    store_tp: int = 0
    kv_heads: int = 0
    kinds: tuple[Kind, ...] = ()
    stages: tuple[Stage, ...] = ()
    tp: int = 1
    objects: tuple[tuple[ObjectId, int], ...] = ()
    draft_drop: bool = False

    @property
    def caches(self) -> bool:
        """Whether anything is loaded or saved."""
        return self.verdict.state != DISABLED


@dataclass(frozen=True)
class _Case:
    """All inputs of the checks."""

    parsed: Parsed
    engine: EngineFacts
    ranks: Sequence[RankFacts]

    @property
    def layers(self) -> list[LayerFacts]:
        return [layer for facts in self.ranks for layer in facts.layers]


_Check = Callable[[_Case], tuple[str, str] | None]


def _engine_problem(case: _Case) -> tuple[str, str] | None:
    for problem in (case.engine.problem, *(p for facts in case.ranks for p in facts.problems)):
        if problem:
            reason, _, message = problem.partition(": ")
            return reason, message
    return None


def _ranks_incomplete(case: _Case) -> tuple[str, str] | None:
    try:
        check_ranks(case.engine, case.ranks)
    except LayoutError as error:
        return "FactsInconsistent", str(error)
    return None


def _context_parallel(case: _Case) -> tuple[str, str] | None:
    if case.engine.dcp == 1 and case.engine.pcp == 1:
        return None
    return "ContextParallel", (
        f"decode context parallel {case.engine.dcp} and prefill context parallel {case.engine.pcp}: a rank holds parts "
        "of a block's tokens, which have no common form; run without context parallelism to cache"
    )


def _no_layers(case: _Case) -> tuple[str, str] | None:
    return None if case.layers else ("NoKVCache", "the model has no KV-cache layers, there is nothing to cache")


def _several_kinds(case: _Case) -> tuple[str, str] | None:
    kinds = {
        (layer.retention, layer.encoding, layer.sliceable, layer.heads, layer.cell_bytes, layer.block_tokens)
        for layer in case.layers
    }
    rules = sorted({layer.retention.rule for layer in case.layers})
    if len(kinds) == 1 and rules == ["full"] and case.engine.cache_groups == 1:
        return None
    return "SeveralKinds", (
        f"{len(kinds)} cache geometries in {case.engine.cache_groups} cache groups with retention {', '.join(rules)}: "
        "only models whose layers all have one full-attention cache are cached today"
    )


def _hash_granularity(case: _Case) -> tuple[str, str] | None:
    engine, layer = case.engine, case.layers[0]
    if engine.hash_block_tokens == engine.block_tokens == layer.block_tokens:
        return None
    return "BlockMismatch", (
        f"block hashes cover {engine.hash_block_tokens} tokens, scheduler blocks {engine.block_tokens}, cache blocks "
        f"{layer.block_tokens}: one size expected"
    )


def _config_invalid(case: _Case) -> tuple[str, str] | None:
    return ("ConfigInvalid", "; ".join(case.parsed.mistakes)) if case.parsed.mistakes else None


def _hash_random(case: _Case) -> tuple[str, str] | None:
    if case.engine.hash_reproducible:
        return None
    return "HashNotReproducible", (
        f"block hashes of {case.engine.hash_algorithm} differ between processes: "
        "use --prefix-caching-hash-algo sha256_cbor and no PYTHONHASHSEED=random"
    )


def _pool_mismatch(case: _Case) -> tuple[str, str] | None:
    config, engine = case.parsed.config, case.engine
    if config.block_size_tokens and config.block_size_tokens != engine.block_tokens:
        return "BlockMismatch", (
            f"blocks of {engine.block_tokens} tokens, the pool's {config.block_size_tokens} expected: "
            f"start the engine with --block-size {config.block_size_tokens}"
        )
    if config.hash_algorithm and config.hash_algorithm != engine.hash_algorithm:
        return "HashMismatch", (
            f"hash algorithm {engine.hash_algorithm}, the pool's {config.hash_algorithm} expected: "
            f"start the engine with --prefix-caching-hash-algo {config.hash_algorithm}"
        )
    return None


def _weights_unknown(case: _Case) -> tuple[str, str] | None:
    return ("WeightsUnknown", case.engine.weights_problem) if case.engine.weights_problem else None


def _not_sliceable(case: _Case) -> tuple[str, str] | None:
    layer = case.layers[0]
    if layer.sliceable or case.engine.kv_heads == 1:
        return None
    return "EncodingNotSliceable", (
        f"cell encoding {layer.encoding} mixes heads, so no other TP size could read its blocks: "
        "use an attention backend with one slot per KV head"
    )


def _heads_mismatch(case: _Case) -> tuple[str, str] | None:
    engine = case.engine
    if problem := tp_problem(engine.tp, engine.kv_heads):
        return "HeadsMismatch", problem
    expected = engine.kv_heads // effective_tp(engine.tp, engine.kv_heads)
    found = case.layers[0].heads
    if found == expected:
        return None
    return "HeadsMismatch", (
        f"a rank holds {found} heads, {expected} expected for {engine.kv_heads} KV heads and TP {engine.tp}"
    )


def _store_tp_invalid(case: _Case) -> tuple[str, str] | None:
    try:
        _store_tp(case.parsed.config, case.engine)
    except LayoutError as error:
        return "StoreTPInvalid", str(error)
    return None


def _stages_invalid(case: _Case) -> tuple[str, str] | None:
    try:
        _shared_plan(case)
    except LayoutError as error:
        return "PPMismatch", str(error)
    return None


#: The checks in order; the first that speaks decides.
CHECKS: tuple[tuple[str, _Check], ...] = (
    (DISABLED, _engine_problem),
    (DISABLED, _ranks_incomplete),
    (DISABLED, _context_parallel),
    (DISABLED, _no_layers),
    (DISABLED, _several_kinds),
    (DISABLED, _hash_granularity),
    (ISOLATED, _config_invalid),
    (ISOLATED, _hash_random),
    (ISOLATED, _pool_mismatch),
    (ISOLATED, _weights_unknown),
    (ISOLATED, _not_sliceable),
    (ISOLATED, _heads_mismatch),
    (ISOLATED, _store_tp_invalid),
    (ISOLATED, _stages_invalid),
)

#: Reasons after which equal manifests do not prove equal bytes: the engine gets a namespace of its own.
INCOMPLETE_IDENTITY = frozenset({"HashNotReproducible", "WeightsUnknown"})


def _store_tp(config: ConnectorConfig, engine: EngineFacts) -> int:
    """S for this engine.

    Raises:
        LayoutError: no valid S, two sources that disagree, or S is no multiple of the engine's own effective size.
    """
    explicit = None if config.store_tp_size is None else normalise_store_tp(config.store_tp_size, engine.kv_heads)
    size = explicit
    if config.enable_store_tp_lcm:
        size = resolve_store_tp(config.lcm_sizes, kv_heads=engine.kv_heads).size
        if explicit is not None and explicit != size:
            raise LayoutError(
                f"store_tp_size {explicit} and the lcm {size} of the listed sizes given: remove one of them"
            )
    if size is None:
        size = effective_tp(engine.tp, engine.kv_heads)
    if size % effective_tp(engine.tp, engine.kv_heads):
        raise LayoutError(
            f"Store TP {size} given, a multiple of this engine's TP {engine.tp} expected: "
            f"add TP {engine.tp} to the pool"
        )
    return size


def _kind(case: _Case) -> Kind:
    layer = case.layers[0]
    indices = sorted({item.index for item in case.layers})
    return Kind(
        layer.retention.name, layer.retention, layer.encoding, case.engine.kv_heads, layer.cell_bytes,
        layer.block_tokens, tuple(indices),
    )  # fmt: skip


def _shared_plan(case: _Case) -> tuple[Kind, int, tuple[Stage, ...]]:
    """Kind, S and stages of a sharing engine, proven by tiling over all its ranks."""
    config, engine = case.parsed.config, case.engine
    kind, store_tp = _kind(case), _store_tp(config, engine)
    sizes = config.pipeline_parallel_sizes or (engine.pp,)
    boundaries = common_boundaries(engine.hidden_layers, sizes, config.stage_boundaries)
    stages = stages_of(boundaries, kind.layers)
    held: list[HeldObject] = []
    for facts in case.ranks:
        held.extend(
            shared_objects(
                kind, store_tp, stages, tp=engine.tp, tp_rank=facts.tp_rank, held_layers=[x.index for x in facts.layers]
            )
        )
    total = {id_: object_bytes(kind, store_tp, stages[id_.stage]) for id_ in object_ids(kind, store_tp, stages)}
    for block_number in range(engine.tp // effective_tp(engine.tp, engine.kv_heads)):
        prove_tiling(total, held, block_number)
    return kind, store_tp, stages


def decide(parsed: Parsed, engine: EngineFacts, ranks: Sequence[RankFacts]) -> Decision:
    """Decide once for an engine, from its configuration, its own facts and those of all its ranks."""
    case = _Case(parsed, engine, sorted(ranks, key=lambda facts: facts.rank))
    prefix = parsed.config.cache_namespace
    for state, check in CHECKS:
        if found := check(case):
            verdict = Verdict(state, *found)
            return Decision(verdict, prefix) if state == DISABLED else _isolated(case, verdict)
    kind, store_tp, stages = _shared_plan(case)
    manifest = _manifest(case, replace(kind, kv_heads=engine.kv_heads), store_tp, [list(s.layers) for s in stages])
    digest = fingerprint(manifest)
    return Decision(
        Verdict(SHARED, "Shared", f"shares {store_tp} Store shards in {len(stages)} Store stages"),
        prefix,
        keys.namespace(prefix, digest),
        digest,
        tuple(sorted(flatten(manifest).items())),
        store_tp,
        engine.kv_heads,
        (kind,),
        stages,
        engine.tp,
        tuple((i, object_bytes(kind, store_tp, stages[i.stage])) for i in object_ids(kind, store_tp, stages)),
        engine.draft_drop,
    )


def _manifest(case: _Case, kind: Kind, store_tp: int, stages: object) -> dict[str, object]:
    """Everything besides the pool prefix that changes bytes or the meaning of a key."""
    engine = case.engine
    return {
        "format": keys.FORMAT,
        "store_tp": store_tp,
        "stages": stages,
        "hash_algorithm": engine.hash_algorithm,
        "draft_drop": engine.draft_drop,
        f"kind.{kind.name}": {k: v for k, v in asdict(kind).items() if k != "name"},
        **engine.identity,
    }


def _isolated(case: _Case, verdict: Verdict) -> Decision:
    """A private, rank-local namespace: one opaque object per rank and block."""
    engine = case.engine
    kind = _kind(case)
    manifest = _manifest(case, kind, 0, [])
    manifest["isolated"] = {
        "reason": verdict.reason, "tp": engine.tp, "pp": engine.pp, "dcp": engine.dcp, "pcp": engine.pcp,
        "layouts": [[layer.layout for layer in facts.layers] for facts in case.ranks],
        "layers": [[layer.index for layer in facts.layers] for facts in case.ranks],
        "instance": engine.instance if verdict.reason in INCOMPLETE_IDENTITY else "",
    }  # fmt: skip
    digest = fingerprint(manifest)
    prefix = case.parsed.config.cache_namespace
    held = [isolated_objects_of(kind, facts) for facts in case.ranks]
    return Decision(
        verdict, prefix, keys.namespace(prefix, digest, isolated=True), digest,
        tuple(sorted(flatten(manifest).items())), len(case.ranks), engine.kv_heads, (kind,), (), engine.tp,
        tuple((item.id, item.size) for item in held if item.size), engine.draft_drop,
    )  # fmt: skip


def isolated_objects_of(kind: Kind, facts: RankFacts) -> HeldObject:
    """The opaque object of one isolated rank."""
    heads = facts.layers[0].heads if facts.layers else 0
    return isolated_object(kind, rank=facts.rank, heads=heads, held_layers=[layer.index for layer in facts.layers])


def held_objects(decision: Decision, facts: RankFacts) -> tuple[HeldObject, ...]:
    """The objects of a block that the rank with ``facts`` writes and reads under ``decision``."""
    if not decision.caches or not facts.layers:
        return ()
    (kind,) = decision.kinds
    if decision.verdict.state == ISOLATED:
        return (isolated_objects_of(kind, facts),)
    return shared_objects(
        kind, decision.store_tp, decision.stages, tp=decision.tp, tp_rank=facts.tp_rank,
        held_layers=[layer.index for layer in facts.layers],
    )  # fmt: skip
