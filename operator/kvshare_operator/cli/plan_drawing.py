"""The picture of a plan as plain values: lanes of ranks over the shards and stages of one block. Pure.

Why this exists: the terminal and the SVG show the same picture; what stands where is decided once, here, from the
same rows that the JSON has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvshare_operator.core.pool.plan import Plan

MOST_REPLICAS = 4
"""Lanes shown for ranks that hold the same heads; more are counted."""
MOST_STAGES = 12
"""Stages shown; more are counted."""
_LONGEST_LIST = 8


@dataclasses.dataclass(frozen=True)
class Bar:
    """One rank: it holds the shards ``first`` to ``last``."""

    text: str
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Lane:
    """One line of bars that do not overlap, in the order of their shards. ``title`` is empty for further replicas."""

    title: str
    bars: tuple[Bar, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One Store stage: its number and its layers as text."""

    number: int
    layers: str


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Everything that is drawn.

    Attributes:
        shards: number of Store shards, the columns.
        heads: KV heads of each shard as text; empty while they are not known.
        stages: rows of the block's grid; empty while the number of layers is not known.
        lanes: ranks, TP size after TP size.
        notes: what is not drawn.
    """

    shards: int
    heads: tuple[str, ...]
    stages: tuple[Stage, ...]
    lanes: tuple[Lane, ...]
    notes: tuple[str, ...]


def drawing_of(plan: Plan) -> Drawing | None:
    """Return the picture; None when there is no Store TP and so nothing to draw."""
    if plan.store_tp is None or not plan.ranks:
        return None
    notes: list[str] = []
    lanes: list[Lane] = []
    for tp in dict.fromkeys(row.tp for row in plan.ranks):
        ranks = [row for row in plan.ranks if row.tp == tp]
        replicas = ranks[0].replicas
        for replica in range(min(replicas, MOST_REPLICAS)):
            bars = tuple(
                Bar(f"rank {row.rank}", row.shards[0], row.shards[-1]) for row in ranks if row.replica == replica
            )
            lanes.append(Lane(f"TP {tp}" if replica == 0 else "", bars))
        if replicas > MOST_REPLICAS:
            notes.append(f"TP {tp}: {replicas - MOST_REPLICAS} more ranks hold the same as each one shown")
    stages = tuple(Stage(number, span(layers)) for number, layers in plan.stages[:MOST_STAGES])
    if len(plan.stages) > MOST_STAGES:
        notes.append(f"{len(plan.stages) - MOST_STAGES} more stages")
    return Drawing(plan.store_tp, _heads(plan), stages, tuple(lanes), tuple(notes))


def _heads(plan: Plan) -> tuple[str, ...]:
    """KV heads of each shard, from any rank that holds it: a rank's heads are its shards' heads in order."""
    found: dict[int, str] = {}
    for row in plan.ranks:
        if not row.kv_heads:
            return ()
        width = len(row.kv_heads) // len(row.shards)
        for place, shard in enumerate(row.shards):
            found[shard] = span(row.kv_heads[place * width : (place + 1) * width])
    return tuple(found[shard] for shard in sorted(found))


def span(numbers: Sequence[int]) -> str:
    """Return `0-3` for consecutive numbers, else the first few of them."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:_LONGEST_LIST]))
    return shown + (", ..." if len(numbers) > _LONGEST_LIST else "")
