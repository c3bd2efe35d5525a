"""What a pool would look like: the answer behind `kvshare plan`, without a cluster.

Why this exists: people want to see Store TP, shards and stages before they apply a pool, and whether an edit
would start an empty cache. Everything comes from ``resolve`` and ``kvshare_layout``; here it is only laid out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final

from kvshare_layout import heads, stages
from kvshare_layout.errors import LayoutError
from kvshare_layout.kinds import INDEXER
from kvshare_operator.api.pool import Spec
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.api.status import Status
from kvshare_operator.core.pool.model_config import ModelConfig
from kvshare_operator.core.pool.resolve import Resolution, resolve

#: Tokens of a block of the only kernels for indexers whose form of keys is known.
_INDEXER_BLOCK: Final = 64
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class PlannedPool:
    """One pool as it was read: from a file, or from flags (then namespace and name are None)."""

    spec: Spec
    namespace: str | None = None
    name: str | None = None
    status: Status | None = None


@dataclasses.dataclass(frozen=True)
class Rank:
    """One tensor-parallel rank; ``kv_heads`` is empty while the number of KV heads is unknown."""

    tp: int
    rank: int
    kv_heads: tuple[int, ...]
    shards: tuple[int, ...]
    replica: int
    replicas: int


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of the model's caches.

    Attributes:
        name: in keys; behind a state's stand TP size and form.
        words: for people.
        window: tokens of its window, None where it has none.
        layers: its layers.
        stages: number and layers of its Store stages.
        cached: False for kinds with which members are disabled.
    """

    name: str
    words: str
    window: int | None
    layers: tuple[int, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    cached: bool


@dataclasses.dataclass(frozen=True)
class PlanProblem:
    """One thing that keeps the plan from working."""

    field: str
    refusal: Refusal


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer. ``store_tp`` is None when there is none."""

    store_tp: int | None
    source: str
    cache_namespace: str | None
    cache_split: bool
    ranks: tuple[Rank, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    problems: tuple[PlanProblem, ...]
    kinds: tuple[Kind, ...] = ()


def make_plan(
    pool: PlannedPool,
    previous: PlannedPool | None = None,
    layers: int | None = None,
    model: ModelConfig | None = None,
) -> Plan:
    """Lay a pool out.

    ``previous`` is the pool before an edit; ``layers`` the model's hidden layers; ``model`` what its own file says.
    """
    before = _resolved(previous, None) if previous else None
    remembered = pool.status or Status()
    if before is not None and before.store_tp is not None:
        kept = {"store_tp_size": before.store_tp, "kv_heads": remembered.kv_heads or before.kv_heads}
        remembered = remembered.model_copy(update=kept)
    now = _resolved(pool, remembered)
    problems = [*_name_problems(pool.name), *_problems(pool.spec, now), *_stage_problems(pool.spec, layers)]
    problems += _block_problems(pool, model)
    split = before is not None and previous is not None and _splits(previous, before, pool, now)
    kept_tp = remembered.store_tp_size
    moved = now.store_tp is not None and kept_tp is not None and _normal(kept_tp, now.kv_heads) != now.store_tp
    if moved and pool.spec.store_tp_size is None:
        text = f"Store TP would move from {kept_tp} to {now.store_tp}, which the API server refuses"
        problems.append(PlanProblem("spec.storeTPSize", refusal("StoreTPMoved", problem=text)))
    return Plan(
        store_tp=now.store_tp,
        source=now.source,
        cache_namespace=now.cache_namespace if pool.name is not None else None,
        cache_split=split or moved,
        ranks=_ranks(pool.spec, now),
        stages=_stages(pool.spec, layers),
        problems=tuple(problems),
        kinds=_kinds(pool.spec, model),
    )


def _name_problems(name: str | None) -> list[PlanProblem]:
    """What the API server would say about the object's own name."""
    if name is None or _NAME.fullmatch(name):
        return []
    text = (
        f"metadata.name {name!r} given, at most 63 lower-case letters, digits and hyphens expected, no dots, "
        "with a letter or digit at both ends: it becomes a label value and part of Service names"
    )
    return [PlanProblem("metadata.name", refusal("SpecInvalid", problem=text))]


def _block_problems(pool: PlannedPool, model: ModelConfig | None) -> list[PlanProblem]:
    """Members get the pool's block size as a flag, and vLLM refuses one that none of its kernels takes."""
    tokens = pool.spec.cache.block_size_tokens
    indexed = model is not None and any(kind.cache == INDEXER for kind in model.kinds)
    if pool.name is None or not indexed or tokens == _INDEXER_BLOCK:
        return []
    text = (
        f"{tokens} tokens given, {_INDEXER_BLOCK} expected for layers with an indexer: vLLM's kernels take no other "
        "block on NVIDIA GPUs, and engines would not start"
    )
    return [PlanProblem("spec.cache.blockSizeTokens", refusal("SpecInvalid", problem=text))]


def _resolved(pool: PlannedPool, remembered: Status | None) -> Resolution:
    return resolve(pool.namespace or "default", pool.name or "plan", pool.spec, remembered or pool.status)


def _normal(store_tp: int, kv_heads: int | None) -> int:
    if kv_heads is None:
        return store_tp
    try:
        return heads.normalise_store_tp(store_tp, kv_heads)
    except LayoutError:
        return store_tp


def _splits(previous: PlannedPool, before: Resolution, pool: PlannedPool, now: Resolution) -> bool:
    if previous.name is not None and pool.name is not None and before.cache_namespace != now.cache_namespace:
        return True
    stage_sizes = [sorted(one.spec.pipeline_parallel_sizes) for one in (previous, pool)]
    return previous.spec.cache != pool.spec.cache or stage_sizes[0] != stage_sizes[1]


def _problems(spec: Spec, now: Resolution) -> list[PlanProblem]:
    """Name the field of each size that vLLM cannot use; everything else keeps the reason it already has."""
    out = []
    fields = {
        "spec.prefill.tensorParallelSizes": spec.prefill.tensor_parallel_sizes,
        "spec.decode.tensorParallelSizes": spec.decode.tensor_parallel_sizes if spec.decode else [],
        "spec.reservedTensorParallelSizes": spec.reserved_tensor_parallel_sizes or [],
    }
    for field, sizes in fields.items():
        for size in sizes:
            problem = heads.tp_problem(size, now.kv_heads) if now.kv_heads is not None else None
            if problem is not None:
                out.append(PlanProblem(field, refusal("StoreTPConflict", problem=problem)))
    for mistake in now.mistakes:
        if mistake.code == "StoreTPConflict":
            if not out:
                out.append(PlanProblem("spec.storeTPSize", mistake))
        else:
            field = mistake.message.split(" ", 1)[0].rstrip(":") if mistake.code != "PoolNotReady" else ""
            out.append(PlanProblem(f"spec.{field}" if not field.startswith("spec") else field, mistake))
    return out


def _ranks(spec: Spec, now: Resolution) -> tuple[Rank, ...]:
    if now.store_tp is None:
        return ()
    out = []
    for tp in spec.listed_sizes():
        for rank in range(tp):
            try:
                share = heads.head_share(tp, rank, now.kv_heads or now.store_tp, now.store_tp)
            except LayoutError:
                return ()
            kv_heads = tuple(share.kv_heads) if now.kv_heads is not None else ()
            out.append(Rank(tp, rank, kv_heads, tuple(share.shards), share.replica, share.replicas))
    return tuple(out)


def _stages(
    spec: Spec, layers: int | None, members: Sequence[int] | None = None
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Stages of all layers, or of those of a kind."""
    if layers is None:
        return ()
    try:
        bounds = stages.common_boundaries(layers, spec.pipeline_parallel_sizes)
    except LayoutError:
        return ()
    cut = stages.stages_of(bounds, range(layers) if members is None else members)
    return tuple((stage.number, stage.layers) for stage in cut)


def _kinds(spec: Spec, model: ModelConfig | None) -> tuple[Kind, ...]:
    if model is None:
        return ()
    return tuple(
        Kind(
            name=kind.cache or kind.retention.name,
            words="state, read by one TP size" if kind.state else kind.cache or kind.retention.words,
            window=kind.retention.window or None,
            layers=kind.layers,
            stages=_each(kind.layers) if kind.state else _stages(spec, model.layers, kind.layers),
            cached=all(one.cached for one in model.kinds),
        )
        for kind in model.kinds
    )


def _each(layers: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Every layer by itself, as the states of ranks are stored."""
    return tuple((number, (layer,)) for number, layer in enumerate(layers))


def _stage_problems(spec: Spec, layers: int | None) -> list[PlanProblem]:
    if layers is None:
        return []
    try:
        stages.common_boundaries(layers, spec.pipeline_parallel_sizes)
    except LayoutError as error:
        return [
            PlanProblem("spec.pipelineParallelSizes", refusal("SpecInvalid", problem=problem))
            for problem in error.mistakes
        ]
    return []
