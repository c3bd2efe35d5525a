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
from kvshare_layout.kinds import Kind
from kvshare_layout.objects import HeldObject, object_bytes, object_ids, prove_tiling, shared_objects
from kvshare_layout.stages import Stage, common_boundaries, stages_of

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


def _several_kinds(case: Case) -> tuple[str, str] | None:
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


def _hash_granularity(case: Case) -> tuple[str, str] | None:
    engine, layer = case.engine, case.layers[0]
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


def _weights_unknown(case: Case) -> tuple[str, str] | None:
    return ("WeightsUnknown", case.engine.weights_problem) if case.engine.weights_problem else None


def _not_sliceable(case: Case) -> tuple[str, str] | None:
    layer = case.layers[0]
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
    found = case.layers[0].heads
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


def kind_of(case: Case) -> Kind:
    """The one kind of an engine whose layers have passed the checks that disable."""
    layer = case.layers[0]
    indices = sorted({item.index for item in case.layers})
    return Kind(
        layer.retention.name, layer.retention, layer.encoding, case.engine.kv_heads, layer.cell_bytes,
        layer.block_tokens, tuple(indices),
    )  # fmt: skip


def shared_plan(case: Case) -> tuple[Kind, int, tuple[Stage, ...]]:
    """Kind, S and stages of a sharing engine, proven by tiling over all its ranks."""
    config, engine = case.parsed.config, case.engine
    kind, store_tp = kind_of(case), store_tp_of(config, engine)
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
