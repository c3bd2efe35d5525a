"""Both implementations of a batch, over everything a cache may look like: exact bytes, poisoned memory."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare_connector.kernels import naive
from kvshare_connector.kernels.choice import Kernels
from kvshare_connector.kernels.plain import Plain
from kvshare_connector.worker.facts import block_view
from physical import LAYOUTS, caches, label
from poison import POISON

pytest.importorskip("triton")

Make = Callable[..., Kernels]


@pytest.fixture(scope="module", params=["plain", "triton"])
def make(request: pytest.FixtureRequest, repack: ModuleType) -> Make:
    """Either implementation."""
    made: Make = Plain if request.param == "plain" else repack.Repack
    return made


def _shards(layers: int, heads: int, width: int) -> list[list[naive.Run]]:
    return [[(slot, start, width) for slot in range(layers)] for start in range(0, heads, width)]


def _row(views: Sequence[torch.Tensor], runs: Sequence[naive.Run], block: int) -> torch.Tensor:
    """The bytes of an object, by definition: run after run, each dense."""
    return torch.cat([views[slot][block, start : start + heads].reshape(-1) for slot, start, heads in runs])


@settings(max_examples=40)
@given(
    layout=st.sampled_from(LAYOUTS),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (5, 1), (8, 8), (16, 4)]),
    tokens=st.one_of(st.integers(1, 8), st.sampled_from([16, 31, 32, 64, 128])),
    ratio=st.sampled_from([1, 1, 2, 3]),
    cell=st.sampled_from([1, 6, 16, 24, 40, 64 + 32, 80]),
    pad=st.sampled_from([0, 5, 16]),
    offset=st.sampled_from([0, 3, 16]),
    data=st.data(),
)
def test_any_items_move_exactly_their_bytes_from_and_to_any_rows(
    make: Make, layout: str, heads: tuple[int, int], tokens: int, ratio: int, cell: int, pad: int, offset: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Rows in any order, kernel blocks smaller than the block, K and V of different sizes, bytes of any alignment."""
    (count, width), layers, blocks = heads, 2, 3

    def views_of(name: str, **extra: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        storage, views = caches(name, layers, blocks * ratio, count, tokens, cell, **extra)
        return storage, views

    storage, small = views_of(layout, pad=pad, offset=offset)
    for layer, view in enumerate(small):
        view.copy_(label(layer, blocks * ratio, count, tokens, cell))
    whole = [block_view(view, blocks) for view in small]
    objects = _shards(layers, count, width)
    everything = [(number, block) for number in range(len(objects)) for block in range(blocks)]
    items = data.draw(st.lists(st.sampled_from(everything), unique=True, min_size=1, max_size=8))
    which = torch.tensor([number for number, _ in items], dtype=torch.int64)
    where = torch.tensor([block for _, block in items], dtype=torch.int64)
    slots = torch.tensor(data.draw(st.permutations(range(len(items) + 2)))[: len(items)], dtype=torch.int64)
    kernels = make(whole, objects)
    rows = torch.full((len(items) + 2, max(kernels.sizes) + 7), POISON, dtype=torch.uint8)
    expected = rows.clone()
    for (number, block), slot in zip(items, slots.tolist(), strict=True):
        expected[slot, : kernels.sizes[number]] = _row(whole, objects[number], block)
    before = storage.clone()
    kernels.pack(which, where, rows, slots)
    assert torch.equal(rows, expected)
    assert torch.equal(storage, before)

    other = data.draw(st.sampled_from(LAYOUTS))
    target, small = views_of(other, pad=pad)
    wanted, small_wanted = views_of(other, pad=pad)
    for number, block in items:
        for (slot, start, width_), source in zip(objects[number], whole, strict=True):
            part = block_view(small_wanted[slot], blocks)[block, start : start + width_]
            part.copy_(source[block, start : start + width_])
    make([block_view(view, blocks) for view in small], objects).unpack(which, where, rows, slots)
    assert torch.equal(target, wanted)


def test_one_row_goes_to_every_block_that_wants_it(make: Make) -> None:
    """The same key wanted twice has one slot and two destinations."""
    _, views = caches("BLNHC", 2, 4, 2, 3, 8)
    kernels = make(views, _shards(2, 2, 2))
    rows = torch.arange(2 * kernels.sizes[0], dtype=torch.int64).remainder(251).to(torch.uint8).view(2, -1)
    kernels.unpack(torch.zeros(3, dtype=torch.int64), torch.tensor([0, 2, 3]), rows, torch.tensor([1, 1, 0]))
    assert all(torch.equal(_row(views, _shards(2, 2, 2)[0], block), rows[1]) for block in (0, 2))
    assert torch.equal(_row(views, _shards(2, 2, 2)[0], 3), rows[0])
    assert all(bool((view[1] == POISON).all()) for view in views)


@pytest.mark.parametrize("cell", [6, 8, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_an_object_come_from_different_blocks(make: Make, layout: str, cell: int) -> None:
    """Layers of two cache groups in one object: each part has a block of its own and leaves the other's bytes alone."""
    storage, views = caches(layout, 4, 5, 2, 3, cell)
    for layer, view in enumerate(views):
        view.copy_(label(layer, 5, 2, 3, cell))
    size = 3 * cell  # one head of one layer
    parts: list[list[naive.Run]] = [[(0, 1, 1), (2, 1, 1)], [(1, 1, 1), (3, 1, 1)], [(0, 0, 2)]]
    kernels = make(views, parts, [(0, 2 * size), (size, 3 * size), None])
    assert kernels.sizes == (3 * size, 4 * size, 2 * size)
    rows = torch.full((3, 4 * size + 2), POISON, dtype=torch.uint8)
    kernels.pack(torch.tensor([0, 1, 0, 2]), torch.tensor([4, 2, 3, 1]), rows, torch.tensor([0, 0, 1, 2]))
    whole = torch.cat([views[layer][block, 1].reshape(-1) for layer, block in ((0, 4), (1, 2), (2, 4), (3, 2))])
    assert torch.equal(rows[0, : 4 * size], whole)
    assert torch.equal(rows[1, :size], views[0][3, 1].reshape(-1))
    assert torch.equal(rows[1, 2 * size : 3 * size], views[2][3, 1].reshape(-1))
    assert bool((rows[1, size : 2 * size] == POISON).all())
    assert bool((rows[:, 4 * size :] == POISON).all())
    assert torch.equal(rows[2, : 2 * size], _row(views, parts[2], 1))

    target, other = caches(layout, 4, 5, 2, 3, cell)
    expected, wanted = caches(layout, 4, 5, 2, 3, cell)
    for layer, block, source in ((0, 0, 4), (2, 0, 4), (1, 3, 2), (3, 3, 2)):
        wanted[layer][block, 1] = views[layer][source, 1]
    back = make(other, parts, [(0, 2 * size), (size, 3 * size), None])
    back.unpack(torch.tensor([0, 1]), torch.tensor([0, 3]), rows, torch.tensor([0, 0]))
    assert torch.equal(target, expected)
    assert storage.numel() == target.numel()


def test_layers_of_allocations_of_their_own_in_any_order(make: Make) -> None:
    """As engines allocate them one by one; nothing may be concluded from one address to the next."""
    parts = [caches("LBNHC", 1, 3, 2, 4, 8)[1][0] for _ in range(3)]
    for layer, view in enumerate(parts):
        view.copy_(label(layer, 3, 2, 4, 8))
    objects: list[list[naive.Run]] = [[(2, 0, 1), (0, 0, 1), (1, 0, 1)], [(1, 1, 1)]]
    kernels = make(parts, objects)
    rows = torch.full((2, kernels.sizes[0]), POISON, dtype=torch.uint8)
    kernels.pack(torch.tensor([0, 1]), torch.tensor([2, 0]), rows)
    assert torch.equal(rows[0], _row(parts, objects[0], 2))
    assert torch.equal(rows[1, : kernels.sizes[1]], _row(parts, objects[1], 0))
    assert bool((rows[1, kernels.sizes[1] :] == POISON).all())


@pytest.mark.parametrize(
    ("which", "where", "slots", "said"),
    [
        ([2], [0], [0], "objects"),
        ([0], [3], [0], "blocks"),
        ([0], [-1], [0], "blocks"),
        ([0], [0], [2], "rows"),
        ([0], [0], [-1], "rows"),
        ([0, 1], [0, 1], [0], "as many expected"),
    ],
)
def test_numbers_that_do_not_exist_are_refused(
    make: Make, which: list[int], where: list[int], slots: list[int], said: str
) -> None:
    """Before anything is written: a kernel cannot raise, it would write somewhere else."""
    storage, views = caches("LBNHC", 2, 3, 2, 4, 8)
    kernels = make(views, _shards(2, 2, 1))
    rows = torch.zeros((2, kernels.sizes[0]), dtype=torch.uint8)
    for move in (kernels.pack, kernels.unpack):
        with pytest.raises(ValueError, match=said):
            move(torch.tensor(which), torch.tensor(where), rows, torch.tensor(slots))
    assert not rows.any()
    assert bool((storage == POISON).all())
