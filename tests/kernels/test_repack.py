"""The Triton version against the plain one, in Triton's interpreter: exact bytes, poisoned memory."""

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.kernels import naive
from physical import LAYOUTS, caches, label
from poison import POISON

pytest.importorskip("triton")


def _filled(layout: str, layers: int, b: int, h: int, n: int, c: int, **extra: int) -> list[torch.Tensor]:
    _, views = caches(layout, layers, b, h, n, c, **extra)
    for layer, view in enumerate(views):
        view.copy_(label(layer, b, h, n, c))
    return views


def _objects(layers: int, heads: int, width: int) -> list[list[naive.Run]]:
    """Every shard of ``width`` heads, cut into two stages of unequal size."""
    cut = (layers + 1) // 2
    stages = [range(cut), range(cut, layers)] if layers > 1 else [range(1)]
    return [[(slot, s, width) for slot in stage] for s in range(0, heads, width) for stage in stages]


def _expected(
    views: list[torch.Tensor], objects: list[list[naive.Run]], which: list[int], blocks: list[int]
) -> list[bytes]:
    out: list[bytes] = []
    for number, block in zip(which, blocks, strict=True):
        size = sum(views[slot][0, start : start + heads].numel() for slot, start, heads in objects[number])
        row = torch.empty((1, size), dtype=torch.uint8)
        naive.pack(views, objects[number], torch.tensor([block]), row)
        out.append(bytes(row[0].tolist()))
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("layers", "b", "h", "n", "c", "width"),
    [
        (3, 3, 3, 3, 3, 1),
        (2, 4, 2, 16, 64, 1),
        (3, 3, 4, 5, 24, 2),
        (1, 2, 1, 1, 1, 1),
        (2, 3, 2, 3, 4100, 2),
        (2, 2, 16, 2, 160, 4),
        (1, 2, 1, 128, 96, 1),
        (1, 2, 2, 127, 80, 2),
        (1, 2, 12, 9, 36, 3),
    ],
)
def test_packing_equals_the_plain_version(
    repack: ModuleType, layout: str, layers: int, b: int, h: int, n: int, c: int, width: int
) -> None:
    """All objects of all blocks in one launch, in any order, of unequal sizes; nothing beyond them is written."""
    views = _filled(layout, layers, b, h, n, c)
    objects = _objects(layers, h, width)
    order = torch.randperm(len(objects) * b)
    which, blocks = order % len(objects), order // len(objects)
    kernel = repack.Repack(views, objects)
    rows = torch.full((len(order), max(kernel.sizes) + 5), POISON, dtype=torch.uint8)
    kernel.pack(which, blocks, rows)
    for row, want in zip(rows, _expected(views, objects, which.tolist(), blocks.tolist()), strict=True):
        got = bytes(row.tolist())
        assert got[: len(want)] == want
        assert set(got[len(want) :]) == {POISON}


@given(
    layout=st.sampled_from(LAYOUTS),
    layers=st.integers(1, 3),
    b=st.integers(1, 4),
    h=st.integers(1, 3),
    n=st.integers(1, 4),
    c=st.sampled_from([1, 2, 3, 8, 12]),
    pad=st.integers(0, 9),
    offset=st.integers(0, 9),
    data=st.data(),
)
def test_unpacking_writes_exactly_what_arrived(
    repack: ModuleType,
    layout: str,
    layers: int,
    b: int,
    h: int,
    n: int,
    c: int,
    pad: int,
    offset: int,
    data: st.DataObject,
) -> None:
    """A subset of the rows, from their own slots: padding, other blocks and other heads stay poisoned."""
    objects = _objects(layers, h, 1)
    everything = [(o, block) for o in range(len(objects)) for block in range(b)]
    items = data.draw(st.lists(st.sampled_from(everything), unique=True, max_size=6))
    source = _filled("BLHNC", layers, b, h, n, c)
    storage, views = caches(layout, layers, b, h, n, c, pad=pad, offset=offset)
    wanted, wanted_views = caches(layout, layers, b, h, n, c, pad=pad, offset=offset)
    for number, block in items:
        for slot, start, heads in objects[number]:
            wanted_views[slot][block, start : start + heads] = source[slot][block, start : start + heads]
    kernel = repack.Repack(views, objects)
    gap = data.draw(st.integers(0, 9))
    rows = torch.full((len(items), max(kernel.sizes) + gap), POISON, dtype=torch.uint8)
    which = torch.tensor([number for number, _ in items], dtype=torch.int64)
    blocks = torch.tensor([block for _, block in items], dtype=torch.int64)
    for row, bytes_ in zip(rows, _expected(source, objects, which.tolist(), blocks.tolist()), strict=True):
        row[: len(bytes_)] = torch.tensor(list(bytes_), dtype=torch.uint8)
    kernel.unpack(which, blocks, rows)
    assert torch.equal(storage, wanted)


def test_addresses_beyond_two_to_the_31_are_exact(repack: ModuleType) -> None:
    """Strides so large that 32-bit arithmetic would wrap; the memory between is reserved but never touched."""
    stride = 3 << 30
    storage = torch.empty(2 * stride + 64, dtype=torch.uint8)
    layer = storage.as_strided((3, 1, 2, 16), (stride, 32, 32, 1))
    layer[2] = torch.arange(32, dtype=torch.uint8).view(1, 2, 16)
    kernel = repack.Repack([layer], [[(0, 0, 1)]])
    rows = torch.full((1, 32), POISON, dtype=torch.uint8)
    kernel.pack(torch.tensor([0]), torch.tensor([2]), rows)
    assert rows[0].tolist() == list(range(32))
    kernel.unpack(torch.tensor([0]), torch.tensor([1]), rows)
    assert layer[1].reshape(-1).tolist() == list(range(32))


def test_three_axes_are_one_token(repack: ModuleType) -> None:
    """A cache without a token axis."""
    cache = torch.randint(0, 256, (3, 2, 24), dtype=torch.uint8)
    rows = torch.empty((1, 24), dtype=torch.uint8)
    repack.Repack([cache], [[(0, 1, 1)]]).pack(torch.tensor([0]), torch.tensor([2]), rows)
    assert torch.equal(rows[0], cache[2, 1])


LAYER = torch.zeros((3, 2, 4, 8), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("layers", "objects", "said"),
    [
        ([], [], "no layers"),
        ([LAYER.int()], [], "bytes"),
        ([LAYER[0, 0]], [], "bytes"),
        ([LAYER.transpose(2, 3)], [], "dense last axis"),
        ([LAYER, LAYER[:2]], [], "layer 1: shape"),
        ([LAYER], [[(1, 0, 1)]], "run"),
        ([LAYER], [[(0, 1, 2)]], "run"),
        ([LAYER], [[(0, -1, 1)]], "run"),
        ([LAYER], [[(0, 0, 0)]], "run"),
    ],
)
def test_layers_and_runs_that_do_not_fit_are_refused(
    repack: ModuleType, layers: list[torch.Tensor], objects: list[list[naive.Run]], said: str
) -> None:
    """Strides are checked once, before any launch."""
    with pytest.raises(ValueError, match=said):
        repack.Repack(layers, objects)


@pytest.mark.parametrize(
    ("which", "blocks", "rows", "said"),
    [
        ([1], [0], torch.zeros((1, 32), dtype=torch.uint8), "objects"),
        ([0], [3], torch.zeros((1, 32), dtype=torch.uint8), "blocks"),
        ([0], [-1], torch.zeros((1, 32), dtype=torch.uint8), "blocks"),
        ([0], [0, 1], torch.zeros((1, 32), dtype=torch.uint8), "as many expected"),
        ([0], [0], torch.zeros((1, 31), dtype=torch.uint8), "32 or more"),
        ([0], [0], torch.zeros((1, 32), dtype=torch.int8), "rows"),
        ([0], [0], torch.zeros((32, 1), dtype=torch.uint8).t(), "rows"),
        ([0, 0], [0, 1], torch.zeros(40, dtype=torch.uint8).as_strided((2, 32), (8, 1)), "do not overlap"),
    ],
)
def test_items_that_do_not_exist_are_refused(
    repack: ModuleType, which: list[int], blocks: list[int], rows: torch.Tensor, said: str
) -> None:
    """A kernel cannot raise: it would write somewhere else."""
    kernel = repack.Repack([LAYER], [[(0, 0, 1)]])
    if said == "rows" and rows.dtype == torch.uint8:
        rows = torch.zeros((32, 2), dtype=torch.uint8).t()[:1]
    for move in (kernel.pack, kernel.unpack):
        with pytest.raises(ValueError, match=said):
            move(torch.tensor(which), torch.tensor(blocks), rows)


def test_an_empty_batch_is_no_launch(repack: ModuleType) -> None:
    """Nothing to copy."""
    none = torch.empty(0, dtype=torch.int64)
    repack.Repack([LAYER], [[(0, 0, 1)]]).pack(none, none, torch.empty((0, 32), dtype=torch.uint8))
