"""The plain torch version against loops over single bytes, over every layout, with memory poisoned."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.kernels import naive
from physical import LAYOUTS, caches, label
from poison import POISON


def _expected(layers: list[torch.Tensor], runs: list[naive.Run], block: int) -> bytes:
    """The bytes of an object by their definition: run, head, token, byte."""
    out = bytearray()
    for slot, start, heads in runs:
        tokens, cell = layers[slot].shape[2:]
        for h, n, c in itertools.product(range(start, start + heads), range(tokens), range(cell)):
            out.append(int(layers[slot][block, h, n, c]))
    return bytes(out)


def _filled(layout: str, layers: int, b: int, h: int, n: int, c: int, **extra: int) -> list[torch.Tensor]:
    _, views = caches(layout, layers, b, h, n, c, **extra)
    for layer, view in enumerate(views):
        view.copy_(label(layer, b, h, n, c))
    return views


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("b", "h", "n", "c"),
    [(5, 4, 3, 16), (5, 4, 3, 7), (3, 3, 3, 8), (3, 3, 3, 3), (4, 1, 16, 24), (1, 2, 1, 1), (6, 8, 2, 40)],
)
def test_an_object_is_its_runs_in_order(layout: str, b: int, h: int, n: int, c: int) -> None:
    """Byte for byte, also where B, H and N are equal and where cells have odd sizes."""
    layers = _filled(layout, 3, b, h, n, c)
    half = max(1, h // 2)
    for start in range(0, h, half):
        runs = [(slot, start, min(half, h - start)) for slot in (0, 2, 1)]
        blocks = torch.randperm(b)[: max(1, b - 1)]
        size = 3 * runs[0][2] * n * c
        out = torch.full((len(blocks), size), POISON, dtype=torch.uint8)
        naive.pack(layers, runs, blocks, out)
        for row, block in enumerate(blocks.tolist()):
            assert bytes(out[row].tolist()) == _expected(layers, runs, block)


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([1, 3, 8, 16, 20]),
    st.integers(0, 17),
    st.integers(0, 9),
    st.data(),
)
def test_packing_in_one_layout_and_unpacking_in_another_moves_exactly_these_bytes(
    source: str, target: str, layers: int, b: int, h: int, n: int, c: int, pad: int, offset: int, data: st.DataObject
) -> None:
    """Listed blocks and heads arrive, and nothing else of the target's storage changes, padding included."""
    filled = _filled(source, layers, b, h, n, c, pad=pad)
    start = data.draw(st.integers(0, h - 1))
    heads = data.draw(st.integers(1, h - start))
    chosen = data.draw(st.lists(st.integers(0, layers - 1), unique=True, min_size=1))
    runs = [(slot, start, heads) for slot in chosen]
    blocks = torch.tensor(data.draw(st.lists(st.integers(0, b - 1), unique=True)), dtype=torch.int64)
    size = len(runs) * heads * n * c
    arena = torch.full((len(blocks), size + 24), POISON, dtype=torch.uint8)
    naive.pack(filled, runs, blocks, arena[:, 8 : 8 + size])
    assert (arena[:, :8] == POISON).all()
    assert (arena[:, 8 + size :] == POISON).all()
    storage, views = caches(target, layers, b, h, n, c, pad=pad, offset=offset)
    expected, expected_views = caches(target, layers, b, h, n, c, pad=pad, offset=offset)
    for slot in chosen:
        expected_views[slot][blocks, start : start + heads] = filled[slot][blocks, start : start + heads]
    naive.unpack(views, runs, blocks, arena[:, 8 : 8 + size])
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_rows_that_arrived_are_unpacked(layout: str) -> None:
    """A subset of the rows, out of order; other blocks stay poisoned."""
    filled = _filled(layout, 2, 6, 2, 4, 8)
    runs = [(0, 0, 2), (1, 0, 2)]
    rows = torch.full((6, 2 * 2 * 4 * 8), POISON, dtype=torch.uint8)
    naive.pack(filled, runs, torch.arange(6), rows)
    _, views = caches(layout, 2, 6, 2, 4, 8)
    arrived = torch.tensor([4, 1])
    naive.unpack(views, runs, arrived, rows[arrived])
    for block in range(6):
        for view, want in zip(views, filled, strict=True):
            assert torch.equal(view[block], want[block] if block in (1, 4) else torch.full_like(want[block], POISON))


def test_layers_may_have_different_storages_and_strides() -> None:
    """One allocation per layer, one of them a view with padding inside every block."""
    first = torch.randint(0, 256, (4, 2, 3, 8), dtype=torch.uint8)
    wide = torch.randint(0, 256, (4, 3, 5, 16), dtype=torch.uint8)
    second = wide.transpose(1, 2)[:, :2, :, :8]
    out = torch.empty((2, 2 * 48), dtype=torch.uint8)
    naive.pack([first, second], [(1, 0, 2), (0, 0, 2)], torch.tensor([3, 0]), out)
    assert torch.equal(out[0, :48], second[3].reshape(-1))
    assert torch.equal(out[1, 48:], first[0].reshape(-1))


def test_three_axes_are_enough() -> None:
    """A cache without a head axis of its own is a block axis, one slot axis and bytes."""
    cache = torch.randint(0, 256, (3, 1, 24), dtype=torch.uint8)
    out = torch.empty((2, 24), dtype=torch.uint8)
    naive.pack([cache], [(0, 0, 1)], torch.tensor([2, 1]), out)
    assert torch.equal(out, cache[[2, 1], 0])


@pytest.mark.parametrize("width", [47, 49])
def test_rows_of_another_size_are_refused(width: int) -> None:
    """Before anything is written."""
    cache = torch.zeros((3, 2, 3, 8), dtype=torch.uint8)
    rows = torch.full((1, width), POISON, dtype=torch.uint8)
    for move in (naive.pack, naive.unpack):
        with pytest.raises(ValueError, match=r"\(1, 48\) expected"):
            move([cache], [(0, 0, 2)], torch.tensor([1]), rows)
    assert (rows == POISON).all()
    assert not cache.any()


@pytest.mark.parametrize("block", [-1, 3, 1 << 40])
def test_blocks_that_do_not_exist_are_refused(block: int) -> None:
    """A negative number must not wrap round to the last block."""
    cache = torch.zeros((3, 2, 3, 8), dtype=torch.uint8)
    rows = torch.ones((1, 48), dtype=torch.uint8)
    for move in (naive.pack, naive.unpack):
        with pytest.raises((IndexError, RuntimeError)):
            move([cache], [(0, 0, 2)], torch.tensor([block]), rows)
    assert not cache.any()
