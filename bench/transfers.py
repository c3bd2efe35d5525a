"""Transfers: saves and loads of 64 blocks in every layout over a real Mooncake on loopback, against competitors."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.competitors import OneSegment, VllmShapes
from bench.rank import Rank, Shape, block_hashes, prove
from bench.rounds import Ratio, interleaved, ratio, seconds
from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.settings import StoreSettings, set_environment
from physical import LAYOUTS
from testbed import mooncake

#: Blocks of one save or load.
BLOCKS = 64
#: Blocks of vLLM's token-major shapes in one call; its time is taken per byte. 64 would be minutes a round.
FEW = 4
LAYERS, CELL = 32, 2 * 128 * 2
BLOCK_TOKENS = (16, 32)
#: Heads of a shard; a rank has two shards of them, or one of the widest.
WIDTHS = (1, 2, 8)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """What one combination took, against its competitors.

    Attributes:
        layout: physical layout.
        tokens: tokens of a block.
        width: heads of a shard.
        operation: ``save`` or ``load``.
        direct: whether objects are transferred without packing.
        gigabytes_per_second: of the product, for orientation.
        to_one_segment: time against objects ready in one segment.
        vllm_to_ours: time of vLLM's shapes against ours; None where vLLM shares no such layout.
        layer_bytes: bytes of one layer of an object.
    """

    layout: str
    tokens: int
    width: int
    operation: str
    direct: bool
    gigabytes_per_second: float
    to_one_segment: Ratio
    vllm_to_ours: Ratio | None
    layer_bytes: int

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass
class _Numbers:
    """Fresh hashes: a key that exists is not written again."""

    next: int = 1

    def take(self) -> int:
        """A number nobody had."""
        self.next += 1
        return self.next


def measure(shape: Shape, store: MooncakeStore, raw: Any, numbers: _Numbers, rounds: int) -> list[Case]:
    """Prove and measure one combination.

    Raises:
        WrongBytesError: before any figure exists.
    """
    rank = Rank(shape, store, CPU)
    try:
        prove(rank, seed=numbers.take(), count=8)
        one = OneSegment(rank, BLOCKS)
        try:
            return _measure(rank, one, raw, numbers, rounds)
        finally:
            one.close()
    finally:
        rank.close()
        store.remove_prefix("kvs1/p-bench/")


def _measure(rank: Rank, one: OneSegment, raw: Any, numbers: _Numbers, rounds: int) -> list[Case]:
    shape, store = rank.shape, rank.store
    blocks = torch.randperm(shape.blocks)[:BLOCKS].tolist()
    took: dict[str, dict[str, float]] = {}
    theirs = VllmShapes(rank, raw) if shape.layout in ("LBHNC", "LBNHC") else None
    few = BLOCKS if shape.layout == "LBHNC" else FEW

    def ours() -> float:
        hashes = block_hashes(numbers.take() << 32, BLOCKS)
        took["ours"] = {
            "save": seconds(lambda: rank.save(hashes, blocks)),
            "load": seconds(lambda: rank.load(hashes, blocks)),
        }
        store.remove_prefix("kvs1/p-bench/")
        return took["ours"]["save"]

    def ready() -> float:
        keys = one.keys(numbers.take())
        took["one"] = {"save": seconds(lambda: one.save(keys)), "load": seconds(lambda: one.load(keys))}
        store.remove_prefix("kvs1/p-bench/")
        return took["one"]["save"]

    def vllm() -> float:
        assert theirs is not None
        hashes, some = block_hashes(numbers.take() << 32, few), blocks[:few]
        keys: list[str] = []
        saving = seconds(lambda: keys.extend(theirs.save(hashes, some)))
        took["vllm"] = {
            "save": saving * BLOCKS / few,
            "load": seconds(lambda: theirs.load(hashes, some)) * BLOCKS / few,
        }
        store.remove_many(keys)
        return took["vllm"]["save"]

    found: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in ("ours", "one", "vllm")}

    def kept(name: str, work: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            value = work()
            for operation, taken in took[name].items():
                found[name][operation].append(taken)
            return value

        return run

    competitors = {"ours": kept("ours", ours), "one": kept("one", ready)}
    if theirs is not None:
        competitors["vllm"] = kept("vllm", vllm)
    interleaved(competitors, rounds)
    out: list[Case] = []
    for operation in ("save", "load"):
        series = {name: values[operation][1:] for name, values in found.items()}
        rate = shape.block_bytes * BLOCKS / sorted(series["ours"])[len(series["ours"]) // 2] / 1e9
        out.append(
            Case(
                shape.layout, shape.tokens, shape.heads // shape.shards, operation,
                all(bool(planned.pieces) for planned in rank.plan.objects), rate,
                ratio(series["ours"], series["one"]),
                ratio(series["vllm"], series["ours"]) if series["vllm"] else None,
                shape.heads // shape.shards * shape.tokens * shape.cell,
            )
        )  # fmt: skip
    return out


@contextmanager
def clients(folder: Path, segment: str = "3gb") -> Iterator[tuple[MooncakeStore, Any]]:
    """A store on loopback, a client of the product, and a bare one for vLLM's shapes."""
    with mooncake.store(folder, segment=segment) as running:
        settings = StoreSettings(running.address)
        set_environment(settings)
        store = MooncakeStore.open(settings)
        from mooncake.store import MooncakeDistributedStore

        raw = MooncakeDistributedStore()
        if raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", running.address):
            raise RuntimeError("the bare Mooncake client cannot be set up")
        try:
            yield store, raw
        finally:
            raw.close()
            store.close()


def run(
    *, layouts: Sequence[str] = LAYOUTS, tokens: Sequence[int] = BLOCK_TOKENS, widths: Sequence[int] = WIDTHS,
    rounds: int = 5,
) -> list[Case]:  # fmt: skip
    """All combinations, one after the other on one store."""
    numbers, out = _Numbers(), list[Case]()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, clients(Path(folder)) as (store, raw):
        for count in tokens:
            for width in widths:
                for layout in layouts:
                    shards = 1 if width == max(WIDTHS) else 2
                    shape = Shape(layout, LAYERS, BLOCKS + BLOCKS // 2, shards * width, count, CELL, shards)
                    cases = measure(shape, store, raw, numbers, rounds)
                    out += cases
                    for case in cases:
                        print(
                            f"{time.monotonic() - started:5.0f} s  {case.layout} block {case.tokens:>2}, "
                            f"{case.width} heads, {case.operation}: {case.to_one_segment} of one segment, "
                            f"vLLM's shapes {case.vllm_to_ours or '-'}, {case.gigabytes_per_second:.2f} GB/s, "
                            f"{'direct' if case.direct else 'packed'}",
                            file=sys.stderr, flush=True,
                        )  # fmt: skip
    return out


def main() -> None:
    """Some combinations by hand."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfers", description=__doc__)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--tokens", default="16,32")
    parser.add_argument("--widths", default="1,2,8")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    run(
        layouts=given.layouts.split(","), tokens=[int(n) for n in given.tokens.split(",")],
        widths=[int(n) for n in given.widths.split(",")], rounds=given.rounds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
