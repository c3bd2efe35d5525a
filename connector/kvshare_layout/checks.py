"""Checks: the ordered table of reasons why an engine may not share, or not cache at all.

Pure functions over plain values, each giving a reason and a message or None, and the plan whose success the last ones
test. Which state follows and what is done with it is decided in ``verdict``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvshare_layout.config import ConnectorConfig, Parsed
from kvshare_layout.errors import LayoutError
from kvshare_layout.facts import EngineFacts, LayerFacts, RankFacts, check_ranks
from kvshare_layout.heads import effective_tp, normalise_store_tp, resolve_store_tp, tp_problem
from kvshare_layout.indexers import indexer_problem
from kvshare_layout.kinds import INDEXER, STATE, Kind
from kvshare_layout.objects import HeldObject, ObjectId, object_bytes, object_ids, prove_tiling, shared_objects
from kvshare_layout.stages import Stage, common_boundaries, stages_of
from kvshare_layout.states import form_of, state_problem

SHARED, ISOLATED, DISABLED = "shared", "isolated", "disabled"


@dataclass(frozen=True)
class Case:
    """All inputs of the checks.

    Attributes:
        parsed: configuration and what was wrong in it.
        engine: facts of the scheduler process.
        ranks: facts of the ranks, in order.
    """

    parsed: Parsed
    engine: EngineFacts
    ranks: Sequence[RankFacts]

    @property
    def layers(self) -> list[LayerFacts]:
        """The layers of all ranks, rank by rank."""
        return [layer for facts in self.ranks for layer in facts.layers]

    def caches(self, cache: str) -> list[LayerFacts]:
        """The caches of one sort, ``""`` for those of attention, of all ranks."""
        return [layer for layer in self.layers if layer.cache == cache]

    @property
    def attention(self) -> LayerFacts:
        """One of the attention caches, which are all alike but for their windows once that has been checked."""
        return self.caches("")[0]


Check = Callable[[Case], tuple[str, str] | None]


def _engine_problem(case: Case) -> tuple[str, str] | None:
    for problem in (case.engine.problem, *(p for facts in case.ranks for p in facts.problems)):
        if problem:
            reason, _, message = problem.partition(": ")
            return reason, message
    return None


def _ranks_incomplete(case: Case) -> tuple[str, str] | None:
    try:
        check_ranks(case.engine, case.ranks)
    except LayoutError as error:
        return "FactsInconsistent", str(error)
    return None


def _context_parallel(case: Case) -> tuple[str, str] | None:
    if case.engine.dcp == 1 and case.engine.pcp == 1:
        return None
    return "ContextParallel", (
        f"decode context parallel {case.engine.dcp} and prefill context parallel {case.engine.pcp}: a rank holds parts "
        "of a block's tokens, which have no common form; run without context parallelism to cache"
    )


def _no_layers(case: Case) -> tuple[str, str] | None:
    return None if case.layers else ("NoKVCache", "the model has no KV-cache layers, there is nothing to cache")


def _geometry(layer: LayerFacts) -> tuple[object, ...]:
    return layer.encoding, layer.sliceable, layer.heads, layer.cell_bytes, layer.block_tokens


def _several_kinds(case: Case) -> tuple[str, str] | None:
    engine, layers = case.engine, case.layers
    rules = sorted({layer.retention.rule for layer in layers})
    geometries = {_geometry(x) for x in layers}
    found = (
        f"{len(geometries)} cache geometries in {engine.cache_groups} cache groups with retention {', '.join(rules)}"
    )
    if not set(rules) <= {"full", "window", "state"}:
        return "SeveralKinds", (
            f"{found}: only full attention, sliding windows and recurrent states are cached; nothing is known about "
            "how long the blocks of other caches keep their meaning"
        )
    attention, states, indexers = (case.caches(cache) for cache in ("", STATE, INDEXER))
    beside_others = case.parsed.config.inside_multi_connector
    if (states or "state" in rules) and (problem := state_problem(attention, states, beside_others=beside_others)):
        return "SeveralKinds", f"{found}: such recurrent states are not cached: {problem}"
    if indexers and (problem := indexer_problem(engine, attention, indexers)):
        return "SeveralKinds", f"{found}: such layers with an indexer are not cached: {problem}"
    if len({_geometry(x) for x in attention}) > 1:
        return "SeveralKinds", f"{found}: layers whose caches differ in more than their window are not cached"
    groups: dict[int, set[str]] = {}
    for layer in (*attention, *states):
        groups.setdefault(layer.group, set()).add(layer.retention.name)
    if sorted(groups) != list(range(engine.cache_groups)) or any(len(names) > 1 for names in groups.values()):
        return "SeveralKinds", (
            f"{found}, with layers in groups {sorted(groups)}: every cache group must belong to layers of one kind"
        )
    if rules == ["full"] and engine.cache_groups == 1:
        return None
    if engine.cache_groups == 1 and beside_others:
        # Another connector may report the null block, which all requests share: vLLM 0.32 then goes back in requests
        # that run, which a window does not allow.
        return "SeveralKinds", (
            f"{found}, beside another connector: windows by themselves are cached without it only, use one of the two"
        )
    if states and engine.speculates:
        return "SeveralKinds", (
            f"{found}, together with speculative decoding: states are cached without it only, use one of the two"
        )
    return None


def _hash_granularity(case: Case) -> tuple[str, str] | None:
    engine, layer = case.engine, case.attention  # all layers have blocks of one size by now
    if engine.hash_block_tokens == engine.block_tokens == layer.block_tokens:
        return None
    return "BlockMismatch", (
        f"block hashes cover {engine.hash_block_tokens} tokens, scheduler blocks {engine.block_tokens}, cache blocks "
        f"{layer.block_tokens}: one size expected"
    )


def _config_invalid(case: Case) -> tuple[str, str] | None:
    return ("ConfigInvalid", "; ".join(case.parsed.mistakes)) if case.parsed.mistakes else None


def _hash_random(case: Case) -> tuple[str, str] | None:
    if case.engine.hash_reproducible:
        return None
    return "HashNotReproducible", (
        f"block hashes of {case.engine.hash_algorithm} differ between processes: "
        "use --prefix-caching-hash-algo sha256_cbor and no PYTHONHASHSEED=random"
    )


def _pool_mismatch(case: Case) -> tuple[str, str] | None:
    config, engine = case.parsed.config, case.engine
    # The engine makes blocks as large as a state whatever it was told; what it made is in the fingerprint.
    larger = bool(case.caches(STATE)) and engine.block_tokens > config.block_size_tokens
    if config.block_size_tokens and config.block_size_tokens != engine.block_tokens and not larger:
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


def _weights_unknown(case: Case) -> tuple[str, str] | None:
    return ("WeightsUnknown", case.engine.weights_problem) if case.engine.weights_problem else None


def _not_sliceable(case: Case) -> tuple[str, str] | None:
    layer = case.attention
    if layer.sliceable or case.engine.kv_heads == 1:
        return None
    return "EncodingNotSliceable", (
        f"cell encoding {layer.encoding} mixes heads, so no other TP size could read its blocks: "
        "use an attention backend with one slot per KV head"
    )


def _heads_mismatch(case: Case) -> tuple[str, str] | None:
    engine = case.engine
    if problem := tp_problem(engine.tp, engine.kv_heads):
        return "HeadsMismatch", problem
    expected = engine.kv_heads // effective_tp(engine.tp, engine.kv_heads)
    found = case.attention.heads
    if found == expected:
        return None
    return "HeadsMismatch", (
        f"a rank holds {found} heads, {expected} expected for {engine.kv_heads} KV heads and TP {engine.tp}"
    )


def _store_tp_invalid(case: Case) -> tuple[str, str] | None:
    try:
        store_tp_of(case.parsed.config, case.engine)
    except LayoutError as error:
        return "StoreTPInvalid", str(error)
    return None


def _stages_invalid(case: Case) -> tuple[str, str] | None:
    try:
        shared_plan(case)
    except LayoutError as error:
        return "PPMismatch", str(error)
    return None


#: The checks in order; the first that speaks decides.
CHECKS: tuple[tuple[str, Check], ...] = (
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


#: Parts of a staging arena that each take whole objects: two halves for each direction.
STAGING_PARTS = 4
#: Objects lie at multiples of this in a staging arena.
STAGING_ALIGNMENT = 64


def staging_problem(config: ConnectorConfig, object_sizes: Sequence[int]) -> tuple[str, str] | None:
    """Whether the objects that were decided on fit into the staging arena; asked last, whatever the state."""
    largest = max(object_sizes, default=0)
    slot = -(-largest // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
    if slot * STAGING_PARTS <= config.staging_bytes:
        return None
    return "StagingTooSmall", (
        f"staging_bytes {config.staging_bytes} given for objects of {largest} bytes, at least {slot * STAGING_PARTS} "
        "expected: raise staging_bytes (stagingMemoryPerRank of the pool), or use a larger Store TP or more stages"
    )


def identity_complete(case: Case) -> bool:
    """Whether equal manifests prove equal bytes.

    Asked apart from the verdict: an earlier check may have spoken, and then its reason says nothing about identity.
    """
    return _hash_random(case) is None and _weights_unknown(case) is None


def store_tp_of(config: ConnectorConfig, engine: EngineFacts) -> int:
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


def kinds_of(case: Case) -> tuple[Kind, ...]:
    """The kinds of an engine whose layers have passed the checks that disable.

    Full attention, then growing windows, then second caches and states.
    """
    found: dict[str, list[LayerFacts]] = {}
    for x in sorted(case.layers, key=lambda x: (x.cache, x.retention.rule != "full", x.retention.window)):
        found.setdefault(x.kind, []).append(x)
    return tuple(
        Kind(
            name, mine[0].retention, mine[0].encoding, case.engine.kv_heads, mine[0].cell_bytes, mine[0].block_tokens,
            tuple(sorted({x.index for x in mine})), *_local(case.engine, mine[0]),
        )
        for name, mine in found.items()
    )  # fmt: skip


def _local(engine: EngineFacts, layer: LayerFacts) -> tuple[int, str]:
    """The last fields of a kind: ranks that each have a part of their own, and its form; none for heads."""
    return (engine.tp, form_of(layer.encoding, layer.cell_bytes)) if layer.cache == STATE else (0, "")


def groups_of(case: Case, kind: Kind) -> tuple[int, ...]:
    """The engine's cache groups with layers of a kind, ascending. They move with the layout, so no key knows them."""
    return tuple(sorted({x.group for x in case.layers if x.kind == kind.name}))


def layers_of(kind: Kind, facts: RankFacts) -> list[LayerFacts]:
    """The caches of a kind that a rank holds."""
    return [layer for layer in facts.layers if layer.kind == kind.name]


def shared_plan(case: Case) -> tuple[int, tuple[tuple[Kind, tuple[Stage, ...]], ...]]:
    """S, and every kind of a sharing engine with its stages, proven by tiling over all ranks."""
    config, engine = case.parsed.config, case.engine
    store_tp = store_tp_of(config, engine)
    sizes = config.pipeline_parallel_sizes or (engine.pp,)
    boundaries = common_boundaries(engine.hidden_layers, sizes, config.stage_boundaries)
    # A rank's state may be megabytes: one layer is one object, whatever the pipeline.
    each = range(engine.hidden_layers + 1)
    kinds = tuple((kind, stages_of(each if kind.ranks else boundaries, kind.layers)) for kind in kinds_of(case))
    held: list[HeldObject] = []
    total: dict[ObjectId, int] = {}
    for kind, stages in kinds:
        for facts in case.ranks:
            mine = [x.index for x in layers_of(kind, facts)]
            held += shared_objects(kind, store_tp, stages, tp=engine.tp, tp_rank=facts.tp_rank, held_layers=mine)
        total.update({i: object_bytes(kind, store_tp, stages[i.stage]) for i in object_ids(kind, store_tp, stages)})
    for block_number in range(engine.tp // effective_tp(engine.tp, engine.kv_heads)):
        prove_tiling(total, held, block_number)
    return store_tp, kinds
