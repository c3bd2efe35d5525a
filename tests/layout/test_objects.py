"""Objects: the tiling proof, the keys of all ranks, and canonical bytes checked without the code's own arithmetic."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.errors import LayoutError
from kvshare_layout.heads import resolve_store_tp
from kvshare_layout.keys import object_key
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
from kvshare_layout.stages import Stage, common_boundaries, layer_partition, stages_of
from strategies import Pool, kind_of, pools, tp_sizes

LAYERS = 6


def _engine(kind: Kind, store_tp: int, stages: tuple[Stage, ...], tp: int, pp: int) -> list[tuple[HeldObject, ...]]:
    """Held objects of every rank of an engine, pipeline rank by pipeline rank."""
    bounds = layer_partition(LAYERS, pp)
    return [
        shared_objects(kind, store_tp, stages, tp=tp, tp_rank=r, held_layers=range(bounds[p], bounds[p + 1]))
        for p in range(pp)
        for r in range(tp)
    ]


def _sizes(kind: Kind, store_tp: int, stages: tuple[Stage, ...]) -> dict[ObjectId, int]:
    return {id_: object_bytes(kind, store_tp, stages[id_.stage]) for id_ in object_ids(kind, store_tp, stages)}


@given(pools(), st.lists(st.integers(1, LAYERS), min_size=1, max_size=3))
def test_the_proof_accepts_every_topology_of_a_pool(pool: Pool, pipelines: list[int]) -> None:
    """All TP sizes times all pipeline sizes, every block number that decides among replicas."""
    kind = kind_of(pool.kv_heads, range(LAYERS))
    store_tp = resolve_store_tp(pool.sizes, kv_heads=pool.kv_heads).size
    stages = stages_of(common_boundaries(LAYERS, pipelines), range(LAYERS))
    sizes = _sizes(kind, store_tp, stages)
    for tp in set(pool.sizes):
        for pp in set(pipelines):
            ranks = _engine(kind, store_tp, stages, tp, pp)
            for block in range(min(3, max(1, tp // pool.kv_heads))):
                prove_tiling(sizes, [item for rank in ranks for item in rank], block)


@given(pools(), st.lists(st.integers(1, LAYERS), min_size=1, max_size=3), st.data())
def test_keys_put_are_keys_asked_are_keys_loaded(pool: Pool, pipelines: list[int], data: st.DataObject) -> None:
    """For every writer and every reader of a pool, and each key is put once (case A9)."""
    kind = kind_of(pool.kv_heads, range(LAYERS))
    store_tp = resolve_store_tp(pool.sizes, kv_heads=pool.kv_heads).size
    stages = stages_of(common_boundaries(LAYERS, pipelines), range(LAYERS))
    hashes = [bytes([number, 7]) for number in range(4)]

    def key(block: int, id_: ObjectId) -> str:
        return object_key("kvs1/p-x/g1/f-" + "0" * 16, hashes[block], id_.kind, id_.shard, id_.stage)

    asked = {key(b, id_) for b in range(len(hashes)) for id_ in object_ids(kind, store_tp, stages)}
    writer = _engine(
        kind, store_tp, stages, data.draw(st.sampled_from(pool.sizes)), data.draw(st.sampled_from(pipelines))
    )
    put = [key(b, i.id) for b in range(len(hashes)) for rank in writer for i in rank if i.writes(b)]
    reader = _engine(
        kind, store_tp, stages, data.draw(st.sampled_from(pool.sizes)), data.draw(st.sampled_from(pipelines))
    )
    loaded = {key(b, i.id) for b in range(len(hashes)) for rank in reader for i in rank}
    assert len(put) == len(set(put))
    assert set(put) == asked == loaded


def _mutations(ranks: list[list[HeldObject]]) -> Iterator[tuple[str, list[HeldObject]]]:
    """Every way to spoil a plan that the proof must see."""
    everything = [item for rank in ranks for item in rank]
    for i, item in enumerate(everything):
        others = everything[:i] + everything[i + 1 :]
        if item.writes(0):
            yield "lost", others
            yield "twice", [*everything, item]
            runs = list(item.runs)
            yield "run lost", [*others, replace(item, runs=tuple(runs[:-1]))]
            yield "run twice", [*others, replace(item, runs=(*runs, runs[0]))]
            moved = replace(runs[-1], offset=runs[-1].offset + 1)
            yield "run moved", [*others, replace(item, runs=(*runs[:-1], moved))]
            longer = replace(runs[0], size=runs[0].size + 1)
            yield "run longer", [*others, replace(item, runs=(longer, *runs[1:]))]
        yield "other size", [*others, replace(item, size=item.size + 1)]
        yield "other name", [*others, replace(item, id=ObjectId("full", 10_000, 0))]
        if item.replicas > 1:
            yield (
                "replica writes too",
                [*others, replace(item, replica=0, replicas=1)] if not item.writes(0) else others,
            )


@pytest.mark.parametrize(("heads", "tp", "pp"), [(4, 2, 2), (2, 4, 1), (1, 3, 2), (8, 1, 3)])
def test_the_proof_refuses_every_spoilt_plan(heads: int, tp: int, pp: int) -> None:
    """A gap, an overlap, another size or an unknown name, in any object."""
    kind = kind_of(heads, range(LAYERS))
    store_tp = min(tp, heads)
    stages = stages_of(common_boundaries(LAYERS, [pp]), range(LAYERS))
    sizes = _sizes(kind, store_tp, stages)
    ranks = [list(rank) for rank in _engine(kind, store_tp, stages, tp, pp)]
    seen = set()
    for name, spoilt in _mutations(ranks):
        seen.add(name)
        with pytest.raises(LayoutError):
            prove_tiling(sizes, spoilt)
    assert len(seen) >= 8


def test_a_partial_writer_is_refused() -> None:
    """A rank with fewer layers than the object must not write it (case A14)."""
    kind = kind_of(4, range(LAYERS))
    stages = stages_of((0, LAYERS), range(LAYERS))
    with pytest.raises(LayoutError, match="pipeline size"):
        shared_objects(kind, 4, stages, tp=2, tp_rank=0, held_layers=[0, 1])


def _full_cache(heads: int, tokens: int, cell: int) -> npt.NDArray[np.int64]:
    """One block of the whole model: every (layer, head, token, byte) has a label of its own."""
    return np.arange(LAYERS * heads * tokens * cell).reshape(LAYERS, heads, tokens, cell)


def _rank_cache(full: npt.NDArray[np.int64], tp: int, rank: int, layers: range) -> npt.NDArray[np.int64]:
    """What the engine keeps on a rank, said in the engine's own words and not in those of the code under test."""
    heads = full.shape[1]
    if tp >= heads:
        mine = [rank // (tp // heads)]
    else:
        per_rank = heads // tp
        mine = list(range(per_rank * rank, per_rank * (rank + 1)))
    return full[layers.start : layers.stop][:, mine]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
def test_bytes_travel_between_every_pair_of_tp_and_pipeline_sizes(heads: int) -> None:
    """Writer to objects to reader: every byte is at its own place, and objects are what the format says."""
    tokens, cell = 3, 5
    kind = kind_of(heads, range(LAYERS), cell_bytes=cell, block_tokens=tokens)
    sizes = tp_sizes(heads, 8)
    pipelines = [1, 2, 3]
    store_tp = resolve_store_tp(sizes, kv_heads=heads).size
    stages = stages_of(common_boundaries(LAYERS, pipelines), range(LAYERS))
    full = _full_cache(heads, tokens, cell)
    width = heads // store_tp
    by_definition = {
        ObjectId("full", shard, stage.number): np.concatenate(
            [full[layer, shard * width : (shard + 1) * width].reshape(-1) for layer in stage.layers]
        )
        for shard in range(store_tp)
        for stage in stages
    }
    topologies = [(tp, pp) for tp in sizes for pp in pipelines]
    for tp, pp in topologies:
        for block in range(3):
            stored: dict[ObjectId, npt.NDArray[np.int64]] = {}
            bounds = layer_partition(LAYERS, pp)
            for number, held in enumerate(_engine(kind, store_tp, stages, tp, pp)):
                layers = range(bounds[number // tp], bounds[number // tp + 1])
                cache = _rank_cache(full, tp, number % tp, layers)
                for item in held:
                    if item.writes(block):
                        assert item.id not in stored
                        row = np.full(item.size, -1)
                        for run in item.runs:
                            part = cache[run.layer - layers.start, run.head_start : run.head_start + run.heads]
                            row[run.offset : run.offset + run.size] = part.reshape(-1)
                        stored[item.id] = row
            assert stored.keys() == by_definition.keys()
            assert all(np.array_equal(stored[id_], row) for id_, row in by_definition.items())
    for tp, pp in topologies:
        bounds = layer_partition(LAYERS, pp)
        for number, held in enumerate(_engine(kind, store_tp, stages, tp, pp)):
            layers = range(bounds[number // tp], bounds[number // tp + 1])
            want = _rank_cache(full, tp, number % tp, layers)
            cache = np.full_like(want, -1)
            for item in held:
                for run in item.runs:
                    part = by_definition[item.id][run.offset : run.offset + run.size]
                    target = cache[run.layer - layers.start, run.head_start : run.head_start + run.heads]
                    target[...] = part.reshape(target.shape)
            assert np.array_equal(cache, want)


def test_an_isolated_rank_keeps_everything_in_one_object() -> None:
    """Named by its rank, covering all its layers and heads."""
    item = isolated_object(kind_of(8, range(LAYERS)), rank=3, heads=2, held_layers=[5, 4])
    assert item.id == ObjectId("full", 3, 0)
    assert [run.layer for run in item.runs] == [4, 5]
    assert item.size == 2 * 2 * 2 * 8
    prove_tiling({item.id: item.size}, [item])
