"""What a pool would look like: the answer behind `kvshare plan`, without a cluster.

Why this exists: people want to see Store TP, shards and stages before they apply a pool, and whether an edit
would start an empty cache. Everything comes from ``resolve`` and ``kvshare_layout``; here it is only laid out.
"""

from __future__ import annotations

import dataclasses

from kvshare_layout import heads, stages
from kvshare_layout.errors import LayoutError
from kvshare_operator.api.pool import Spec
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.api.status import Status
from kvshare_operator.core.pool.resolve import Resolution, resolve


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


def make_plan(pool: PlannedPool, previous: PlannedPool | None = None, layers: int | None = None) -> Plan:
    """Lay a pool out. ``previous`` is the pool before an edit; ``layers`` the model's hidden layers."""
    before = _resolved(previous, None) if previous else None
    remembered = pool.status or Status()
    if before is not None and before.store_tp is not None:
        kept = {"store_tp_size": before.store_tp, "kv_heads": remembered.kv_heads or before.kv_heads}
        remembered = remembered.model_copy(update=kept)
    now = _resolved(pool, remembered)
    problems = [*_problems(pool.spec, now), *_stage_problems(pool.spec, layers)]
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
    )


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


def _stages(spec: Spec, layers: int | None) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if layers is None:
        return ()
    try:
        bounds = stages.common_boundaries(layers, spec.pipeline_parallel_sizes)
    except LayoutError:
        return ()
    return tuple((stage.number, stage.layers) for stage in stages.stages_of(bounds, range(layers)))


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
