"""Plan: where the bytes of an object lie, from the tensors' real strides."""

import ctypes
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.kernels import naive
from kvshare_connector.worker.facts import block_view
from kvshare_connector.worker.plan import DIRECT_PIECE_BYTES, PlannedObject, RankPlan, direct_limit, make_plan
from kvshare_layout.kinds import FULL, Kind
from kvshare_layout.objects import shared_objects
from kvshare_layout.stages import stages_of
from physical import LAYOUTS, caches, label


def _plan(
    layout: str,
    *,
    heads: int,
    shards: int,
    layers: int = 3,
    blocks: int = 5,
    tokens: int = 4,
    cell: int = 8,
    pad: int = 0,
) -> RankPlan:
    _, views = caches(layout, layers, blocks, heads, tokens, cell, pad=pad)
    for layer, view in enumerate(views):
        view.copy_(label(layer, blocks, heads, tokens, cell))
    kind = Kind("full", FULL, "kv-packed", heads, cell, tokens, tuple(range(layers)))
    held = shared_objects(kind, shards, stages_of((0, layers), kind.layers), tp=1, tp_rank=0, held_layers=kind.layers)
    return make_plan(held, dict(enumerate(views)), direct_piece_bytes=1)


def _packed(plan: RankPlan, planned: PlannedObject, block: int) -> bytes:
    out = torch.empty((1, planned.held.size), dtype=torch.uint8)
    naive.pack(plan.layers, planned.parts[0].runs, torch.tensor([block]), out)
    return bytes(out[0].tolist())


@given(
    st.sampled_from(LAYOUTS), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 3), (8, 2)]), st.integers(1, 4),
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 9), st.sampled_from([0, 8]),
)  # fmt: skip
def test_direct_pieces_are_the_objects_bytes(
    layout: str, split: tuple[int, int], layers: int, blocks: int, tokens: int, cell: int, pad: int
) -> None:
    """B4, B9: read through raw addresses, every layout that offers pieces gives what the pack kernel gives."""
    heads, shards = split
    plan = _plan(layout, heads=heads, shards=shards, layers=layers, blocks=blocks, tokens=tokens, cell=cell, pad=pad)
    for planned in plan.objects:
        if not planned.pieces:
            continue
        for block in range(blocks):
            segments = planned.segments([block])
            data = b"".join(ctypes.string_at(address, size) for address, size in segments)
            assert data == _packed(plan, planned, block)


@pytest.mark.parametrize(
    ("layout", "shards", "pieces"),
    [
        ("LBHNC", 1, 3),
        ("LBHNC", 4, 3),
        ("BLHNC", 1, 1),
        ("BLHNC", 4, 3),
        ("BHLNC", 4, 1),
        ("LBNHC", 1, 0),
        ("BLNHC", 4, 0),
    ],
)
def test_few_large_pieces_where_the_layout_has_them(layout: str, shards: int, pieces: int) -> None:
    """E1: head-major has one piece per layer or less; token-major has none and is packed."""
    plan = _plan(layout, heads=4, shards=shards)
    assert {len(planned.pieces) for planned in plan.objects} == {pieces}


def test_one_head_is_dense_whatever_the_order_of_heads_and_tokens() -> None:
    """With a single head on the rank both orders are the same memory."""
    assert all(planned.pieces for planned in _plan("LBNHC", heads=1, shards=1).objects)


def test_small_pieces_are_packed() -> None:
    """A segment costs more than its copy."""
    _, views = caches("LBHNC", 2, 4, 2, 4, 8)
    kind = Kind("full", FULL, "kv-packed", 2, 8, 4, (0, 1))
    held = shared_objects(kind, 1, stages_of((0, 2), kind.layers), tp=1, tp_rank=0, held_layers=kind.layers)
    plan = make_plan(held, dict(enumerate(views)), direct_piece_bytes=65)
    assert [planned.pieces for planned in plan.objects] == [()]
    assert plan.slot_bytes == 128
    assert make_plan(held, dict(enumerate(views)), direct_piece_bytes=64).slot_bytes == 0


def test_a_whole_object_is_never_packed_unless_everything_is() -> None:
    """One segment is the best shape there is, however small."""
    _, views = caches("BLHNC", 2, 4, 2, 4, 8)
    kind = Kind("full", FULL, "kv-packed", 2, 8, 4, (0, 1))
    held = shared_objects(kind, 1, stages_of((0, 2), kind.layers), tp=1, tp_rank=0, held_layers=kind.layers)
    (planned,) = make_plan(held, dict(enumerate(views))).objects
    assert [piece.size for piece in planned.pieces] == [planned.held.size]
    assert make_plan(held, dict(enumerate(views)), direct_piece_bytes=None).slot_bytes == 128


def test_an_accelerators_memory_is_packed_over_tcp() -> None:
    """A client without support for it would read the address as one of this process."""
    assert direct_limit("tcp", torch.device("cuda", 0)) is None
    assert direct_limit("rdma", torch.device("cuda", 0)) == DIRECT_PIECE_BYTES["rdma"]
    assert direct_limit("tcp", torch.device("cpu")) == DIRECT_PIECE_BYTES["tcp"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_of_several_kernel_blocks_is_one_block_of_more_tokens(layout: str) -> None:
    """B9: the kernel's block is smaller than the cache's; tokens come in their order for every head."""
    _, views = caches(layout, 1, 6, 2, 4, 8)
    view = views[0]
    view.copy_(label(0, 6, 2, 4, 8))
    whole = block_view(view, 3)
    assert whole.shape == (3, 2, 2, 4, 8)
    kind = Kind("full", FULL, "kv-packed", 2, 8, 8, (0,))
    held = shared_objects(kind, 2, stages_of((0, 1), kind.layers), tp=1, tp_rank=0, held_layers=[0])
    plan = make_plan(held, {0: whole}, direct_piece_bytes=1)
    for planned in plan.objects:
        head = planned.held.id.shard
        for block in range(3):
            expected = view[2 * block : 2 * block + 2, head].reshape(-1)
            assert _packed(plan, planned, block) == bytes(expected.tolist())
            if planned.pieces:
                segments = planned.segments([block])
                assert b"".join(ctypes.string_at(a, n) for a, n in segments) == bytes(expected.tolist())


@pytest.mark.parametrize(
    ("shape", "blocks"), [((6, 2, 4), 6), ((6, 2, 4, 8), 4), ((6, 2, 4, 8), 0), ((2, 6, 2, 4, 8), 6)]
)
def test_other_shapes_are_refused_with_what_was_expected(shape: tuple[int, ...], blocks: int) -> None:
    """Never guessed."""
    with pytest.raises(ValueError, match=r"\[blocks, heads, tokens, content\]"):
        block_view(torch.empty(shape), blocks)


def test_content_that_is_not_dense_is_refused() -> None:
    """A cell's bytes must lie together."""
    with pytest.raises(ValueError, match="dense content"):
        block_view(torch.empty(6, 2, 8, 4).transpose(2, 3), 6)


def test_addresses_are_64_bits_wide() -> None:
    """A cache of many GiB has blocks far behind 2^31 bytes."""
    plan = _plan("BLHNC", heads=2, shards=1)
    (planned,) = plan.objects
    far = 1 << 33
    ((address, size),) = planned.segments([far])
    assert address == planned.pieces[0].address + far * planned.pieces[0].block_stride
    assert size == planned.held.size == math.prod((3, 2, 4, 8))
