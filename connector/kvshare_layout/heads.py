"""Heads: which KV heads and Store shards a tensor-parallel rank holds, and which Store TP size a pool needs.

Pure arithmetic on sizes. The rule, with H the model's total number of KV heads:

* vLLM gives a rank ``H / TP`` heads when ``TP <= H``, else one head, replicated over ``TP / H`` neighbouring ranks
  (``ModelConfig.get_num_kv_heads`` and ``QKVParallelLinear``). So only ``e = min(TP, H)`` head ranges differ.
* Every e divides H, so the lcm of all effective sizes divides H: every TP size that vLLM accepts can share.
* A block is cut into S Store shards of ``H / S`` heads; a rank holds consecutive whole shards.

MHA, GQA, replicated GQA, MQA and MLA (H = 1) are the same rule with another H.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvshare_layout.errors import LayoutError


def effective_tp(tp: int, kv_heads: int) -> int:
    """Number of different head ranges that TP ranks hold: ``min(tp, kv_heads)``."""
    return min(tp, kv_heads)


def tp_problem(tp: int, kv_heads: int) -> str | None:
    """Say why vLLM cannot split ``kv_heads`` over ``tp`` ranks, or return None when it can."""
    if tp < 1:
        return f"TP {tp} given, a size of at least 1 expected: correct the size"
    if kv_heads < 1:
        return f"{kv_heads} KV heads given, at least 1 expected: correct the number of KV heads"
    if kv_heads % tp == 0 or tp % kv_heads == 0:
        return None
    return (
        f"TP {tp} given for {kv_heads} KV heads, a divisor or a multiple of {kv_heads} expected: "
        "vLLM cannot split the heads over this size, use another"
    )


@dataclass(frozen=True)
class StoreTP:
    """The Store TP size of a pool.

    Attributes:
        size: number S of Store shards of a block.
        source: ``pinned`` when a person fixed it, ``lcm`` when it follows from the TP sizes.
        provisional: True while the number of KV heads is unknown: S may later be normalised down to it.
    """

    size: int
    source: Literal["pinned", "lcm"]
    provisional: bool


def normalise_store_tp(store_tp: int, kv_heads: int) -> int:
    """Return S for a model with ``kv_heads`` heads: itself when it divides them, H when it is a multiple of H.

    Raises:
        LayoutError: S neither divides the number of KV heads nor is a multiple of it.
    """
    if store_tp < 1 or kv_heads < 1:
        raise LayoutError(f"Store TP {store_tp} and {kv_heads} KV heads given, both must be at least 1")
    if store_tp > kv_heads and store_tp % kv_heads == 0:
        return kv_heads
    if kv_heads % store_tp:
        raise LayoutError(
            f"Store TP {store_tp} given, a divisor of the model's {kv_heads} KV heads expected: "
            "change the pool's TP sizes or its pinned Store TP"
        )
    return store_tp


def resolve_store_tp(sizes: Iterable[int], *, kv_heads: int | None, pinned: int | None = None) -> StoreTP:
    """Choose S for a pool from all its prefill, decode and reserved TP sizes.

    Args:
        sizes: all TP sizes, in any order, repeats allowed.
        kv_heads: H, or None while nobody has said it; S is then the plain lcm and provisional.
        pinned: S as a person fixed it, or None.

    Raises:
        LayoutError: with every mistake found.
    """
    listed = sorted(set(sizes))
    mistakes: list[str] = []
    if not listed:
        mistakes.append("no TP size given, at least one expected: list the prefill and decode TP sizes")
    for tp in listed:
        if tp < 1:
            mistakes.append(f"TP {tp} given, a size of at least 1 expected: correct the size")
        elif kv_heads is not None and (problem := tp_problem(tp, kv_heads)):
            mistakes.append(problem)
    if pinned is not None and pinned < 1:
        mistakes.append(f"Store TP {pinned} given, a size of at least 1 expected: correct storeTPSize")
    if mistakes:
        raise LayoutError(mistakes)
    needed = [tp if kv_heads is None else effective_tp(tp, kv_heads) for tp in listed]
    if pinned is None:
        return StoreTP(math.lcm(*needed), "lcm", kv_heads is None)
    size = pinned if kv_heads is None else normalise_store_tp(pinned, kv_heads)
    # Without H, a size above the pin may still be right: vLLM accepts it when H equals the pin.
    mistakes = [
        f"Store TP {pinned} pinned, a multiple of every TP size expected, TP {tp} does not divide it: "
        "pin a common multiple or remove the pin"
        for tp in needed
        if size % tp and not (kv_heads is None and tp % size == 0)
    ]
    if mistakes:
        raise LayoutError(mistakes)
    return StoreTP(size, "pinned", kv_heads is None)


@dataclass(frozen=True)
class HeadShare:
    """What one tensor-parallel rank holds of every block.

    Attributes:
        kv_heads: its global KV heads, consecutive.
        shards: its Store shards, consecutive, together exactly those heads.
        replica: which of the ranks with the same heads it is, from 0.
        replicas: how many ranks hold the same heads; block number i is written by replica ``i % replicas``.
    """

    kv_heads: range
    shards: range
    replica: int
    replicas: int

    def writes(self, block_number: int) -> bool:
        """Whether this rank, among its replicas, writes block number ``block_number`` of a prompt."""
        return block_number % self.replicas == self.replica


def head_share(tp: int, rank: int, kv_heads: int, store_tp: int) -> HeadShare:
    """Map TP rank ``rank`` of ``tp`` to global heads and Store shards.

    Raises:
        LayoutError: vLLM refuses the TP size, the rank is out of range, or S is no multiple of the effective size.
    """
    mistakes = [p for p in (tp_problem(tp, kv_heads),) if p]
    if not 0 <= rank < tp:
        mistakes.append(f"rank {rank} given for TP {tp}, 0 to {tp - 1} expected")
    if mistakes:
        raise LayoutError(mistakes)
    shards = normalise_store_tp(store_tp, kv_heads)
    e = effective_tp(tp, kv_heads)
    if shards % e:
        raise LayoutError(
            f"Store TP {shards} given, a multiple of this rank's effective TP size {e} expected: "
            f"add TP {tp} to the pool"
        )
    group = rank * e // tp
    replicas = tp // e
    return HeadShare(
        kv_heads=range(group * kv_heads // e, (group + 1) * kv_heads // e),
        shards=range(group * shards // e, (group + 1) * shards // e),
        replica=rank - group * replicas,
        replicas=replicas,
    )
