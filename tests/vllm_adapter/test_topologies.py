"""Any topology writes, any other reads: bytes that a reader calls loaded are the bytes that were stored."""

import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare_connector.scheduler.blocks import KindBlocks
from kvshare_connector.scheduler.hits import search
from kvshare_connector.scheduler.loads import LoadPlan
from kvshare_connector.scheduler.saves import SaveJob
from kvshare_connector.store.memory import MemoryStore
from kvshare_connector.wire import Report, Step
from kvshare_connector.worker.glue import WorkerSide
from kvshare_layout import Decision, decide, keys
from kvshare_layout.config import ConnectorConfig, Parsed
from kvshare_layout.stages import layer_partition
from one_kind import load_plan, save_job
from physical import LAYOUTS, caches, label
from poison import POISON
from strategies import engine_facts

LAYERS, BLOCKS, TOKENS, CELL = 4, 24, 2, 8


@dataclass(frozen=True)
class Topology:
    """How an engine is split, and how its caches lie."""

    tp: int
    pp: int
    layout: str


class FullAttentionSpec(SimpleNamespace):
    """What facts are read from, without an engine."""


class _Backend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


class Ranks:
    """All ranks of one engine with one decision."""

    def __init__(self, store: MemoryStore, heads: int, topology: Topology, pool: Sequence[Topology]) -> None:
        self.store, self.topology, tp, pp = store, topology, topology.tp, topology.pp
        bounds = layer_partition(LAYERS, pp)
        ranges = min(tp, heads)
        self.sides: list[WorkerSide] = []
        self.caches: list[tuple[range, dict[int, torch.Tensor]]] = []
        config = ConnectorConfig(
            store_tp_size=_lcm(min(t.tp, heads) for t in pool), staging_bytes=1 << 14,
            pipeline_parallel_sizes=tuple(sorted({t.pp for t in pool})),
        )  # fmt: skip
        for rank in range(tp * pp):
            layers = range(bounds[rank // tp], bounds[rank // tp + 1])
            group = (rank % tp) * ranges // tp
            held = range(group * heads // ranges, (group + 1) * heads // ranges)
            _, views = caches(topology.layout, len(layers), BLOCKS, len(held), TOKENS, CELL)
            names = [f"model.layers.{i}.attn" for i in layers]
            spec = FullAttentionSpec(block_size=TOKENS, head_size=CELL // 2, head_size_v=CELL // 2, dtype="uint8")
            side = WorkerSide(
                config,
                SimpleNamespace(
                    num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names)]
                ),
                {name: SimpleNamespace(get_attn_backend=lambda: _Backend) for name in names},
                store.another_client, rank=rank, tp_rank=rank % tp, pp_rank=rank // tp, problem="",
            )  # fmt: skip
            side.register_kv_caches(dict(zip(names, views, strict=True)))
            self.sides.append(side)
            self.caches.append((held, dict(zip(layers, views, strict=True))))
        facts = [side.facts() for side in self.sides]
        engine = engine_facts(tp, pp, heads, LAYERS, block_tokens=TOKENS, hash_block_tokens=TOKENS)
        self.decision: Decision = decide(Parsed(config, ()), engine, [f for f in facts if f is not None])
        assert self.decision.verdict.state == "shared", self.decision.verdict
        self.run(Step(self.decision))

    def run(self, step: Step) -> tuple[list[set[int]], Report, list[set[str]]]:
        """One step on every rank, until nothing moves any more."""
        for side in self.sides:
            side.start_loads(step)
            side.start_saves(step)
        deadline = time.monotonic() + 30
        while any(side._transfers is not None and side._transfers.open for side in self.sides):
            assert time.monotonic() < deadline
            time.sleep(0.0002)
        finished = [side.finished_loads()[0] for side in self.sides]
        report = Report()
        for side in self.sides:
            report = report.merge(side.report())
        return [side.bad_block_ids() for side in self.sides], report, finished

    def fill(self) -> None:
        """Label every cell with its place."""
        for held, layers in self.caches:
            for layer, view in layers.items():
                view.copy_(label(layer, BLOCKS, len(held), TOKENS, CELL, first_head=held.start))

    def block(self, rank: int, block: int, source: int) -> str:
        """What a rank has in ``block``: the bytes of ``source``, some of them, nothing, or something else."""
        held, layers = self.caches[rank]
        wanted = {
            layer: label(layer, BLOCKS, len(held), TOKENS, CELL, first_head=held.start)[source] for layer in layers
        }
        if all(torch.equal(view[block], wanted[layer]) for layer, view in layers.items()):
            return "right"
        if all(bool((view[block] == POISON).all()) for view in layers.values()):
            return "empty"
        partly = all(
            bool(((view[block] == wanted[layer]) | (view[block] == POISON)).all()) for layer, view in layers.items()
        )
        return "partly right" if partly else "wrong"

    def close(self) -> None:
        """Stop all threads."""
        for side in self.sides:
            side.close()


def _lcm(sizes: Iterable[int]) -> int:
    return math.lcm(*sizes)


def _hash(number: int) -> bytes:
    return (number * 40503 % 65536).to_bytes(4, "big") * 8


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, Topology, Topology]:
    """A model's heads and two engines that may share."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8) if heads % tp == 0 or tp % heads == 0]
    one = st.builds(Topology, st.sampled_from(sizes), st.sampled_from([1, 2]), st.sampled_from(LAYOUTS))
    return heads, draw(one), draw(one)


@settings(max_examples=25)
@given(pools(), st.integers(1, 12), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.0, 0.02, 0.2]))
def test_whatever_a_reader_calls_loaded_is_what_was_stored(
    pool: tuple[int, Topology, Topology], count: int, dice: random.Random, evicted: float
) -> None:
    """A9, A11, B3, B4, B16: keys put, asked and read are the same; hits end alike on all ranks; replicas write once."""
    heads, writer_topology, reader_topology = pool
    store = MemoryStore(assert_registered=True)
    writer = Ranks(store, heads, writer_topology, pool[1:])
    reader = Ranks(store, heads, reader_topology, pool[1:])
    try:
        assert writer.decision.namespace == reader.decision.namespace
        writer.fill()
        sources, places = dice.sample(range(BLOCKS), count), dice.sample(range(BLOCKS), count)
        hashes = tuple(_hash(n) for n in range(count))
        _, report, _ = writer.run(Step(saves=(save_job(1, 0, tuple(range(count)), hashes, tuple(sources)),)))
        assert (report.released, report.unsaved) == ({1: len(writer.sides)}, frozenset())
        asked = _asked(writer.decision, hashes)
        assert sorted(store.keys) == sorted(asked)
        gone = {key for key in asked if dice.random() < evicted}
        store.evict(gone)
        first_gone = min((n for n in range(count) if any(_hash(n).hex() in key for key in gone)), default=count)
        bad, report, finished = reader.run(Step(loads=(load_plan("r", 1, hashes, tuple(places)),)))
        assert finished == [{"r"}] * len(reader.sides)
        assert set().union(*bad) == set(places[first_gone:])
        for rank, flagged in enumerate(bad):
            for number, place in enumerate(places):
                found = reader.block(rank, place, sources[number])
                # A direct read of one object of a block may succeed where that of another fails.
                assert found == "right" if place not in flagged else found != "wrong"
            assert all(reader.block(rank, block, 0) == "empty" for block in set(range(BLOCKS)) - set(places))
        assert report.unread <= set(hashes[first_gone:])
        written = sum(side.counters.drain().get("saved_bytes", 0) for side in writer.sides)
        assert written == count * LAYERS * heads * TOKENS * CELL
    finally:
        writer.close()
        reader.close()


def _asked(decision: Decision, hashes: Sequence[bytes]) -> list[str]:
    """Every key that a lookup of a complete prompt asks for."""
    kinds = [(kind, decision.objects_of(kind)) for kind in decision.kinds]
    steps, asked = search(decision.namespace, hashes, kinds), list[str]()
    try:
        question = next(steps)
        while True:
            asked += question.keys
            question = steps.send([1] * len(question.keys))
    except StopIteration:
        return asked


def test_the_union_of_all_ranks_reads_every_key_once_per_replica() -> None:
    """A9: what the ranks load together is what the lookup asked for."""
    store = MemoryStore()
    pool = (Topology(4, 1, "LBNHC"), Topology(1, 2, "LBHNC"))
    writer = Ranks(store, 2, pool[0], pool)
    reader = Ranks(store, 2, pool[0], pool)
    try:
        writer.fill()
        hashes = tuple(_hash(n) for n in range(5))
        writer.run(Step(saves=(save_job(1, 0, tuple(range(5)), hashes, tuple(range(5))),)))
        read: list[str] = []
        for side in reader.sides:
            client = side._client.current() if side._client is not None else None
            assert isinstance(client, MemoryStore)
            client.faults.before("get", lambda _, asked: read.extend(asked))
        reader.run(Step(loads=(load_plan("r", 1, hashes, tuple(range(5))),)))
        assert set(read) == set(store.keys) == set(_asked(reader.decision, hashes))
        assert all(read.count(key) == 2 for key in read)
        assert {keys.parse_object_key(key)[1] for key in read} == set(hashes)
    finally:
        writer.close()
        reader.close()


def test_a_rank_without_caches_misses_nothing() -> None:
    """A pipeline stage of layers without a cache: what the other ranks have saved and loaded is complete."""
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[])
    side = WorkerSide(ConnectorConfig(), config, {}, MemoryStore, rank=1, tp_rank=0, pp_rank=1, problem="")
    side.register_kv_caches({})
    blocks = (KindBlocks("full", (0,), (_hash(0),), ((1,),)),)
    step = Step(loads=(LoadPlan("r", 1, 0, 1, blocks),), saves=(SaveJob(1, 0, blocks),))
    side.start_loads(step)
    side.start_saves(step)
    assert side.finished_loads() == ({"r"}, set())
    assert side.bad_block_ids() == set()
    report = side.report()
    assert (report.released, report.unsaved, report.unread) == ({1: 1}, frozenset(), frozenset())
    side.close()
