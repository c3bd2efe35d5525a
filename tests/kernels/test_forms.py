"""Forms: a batch of objects whose layers have cells of different sizes, copied by kernels of one form each."""

from types import ModuleType

import pytest
import torch

from kvshare_connector.kernels import choice, naive
from kvshare_connector.kernels.forms import Forms, several
from kvshare_connector.kernels.plain import Plain
from physical import LAYOUTS, caches, label
from poison import POISON

BLOCKS = 5
#: Layers 0 and 2 have cells of 24 bytes in blocks of 4 tokens, layers 1 and 3 of 13 bytes in blocks of 6.
FORMS = ((4, 24), (6, 13))
OBJECTS: list[list[naive.Run]] = [[(0, 0, 1), (2, 0, 1)], [(1, 0, 2), (3, 0, 2)], [(0, 1, 1), (2, 1, 1)], [(3, 0, 1)]]
SIZES = (2 * 4 * 24, 2 * 2 * 6 * 13, 2 * 4 * 24, 6 * 13)


def _layers(layout: str) -> list[torch.Tensor]:
    made = [caches(layout, 2, BLOCKS, 2, tokens, cell)[1] for tokens, cell in FORMS]
    return [made[0][0], made[1][0], made[0][1], made[1][1]]


def _labelled(layout: str) -> list[torch.Tensor]:
    layers = _layers(layout)
    for number, layer in enumerate(layers):
        layer.copy_(label(number, *layer.shape))
    return layers


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_objects_of_two_forms_move_exactly_their_bytes(
    layout: str, fast: bool, repack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed from one place, unpacked into another of the same layout; nothing else is touched."""
    if fast:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source, target = _labelled(layout), _layers(layout)
    packing, unpacking = choice.kernels_for(source, OBJECTS), choice.kernels_for(target, OBJECTS)
    assert isinstance(packing, Forms)
    assert {type(one) for one in packing._kernels} == {repack.Repack if fast else Plain}
    assert packing.sizes == unpacking.sizes == SIZES
    objects = torch.tensor([1, 0, 3, 2, 1])
    blocks, slots = torch.tensor([2, 1, 2, 1, 4]), torch.tensor([4, 0, 3, 2, 6])
    rows = torch.full((8, 400), POISON, dtype=torch.uint8)
    packing.pack(objects, blocks, rows, slots)
    for item, (number, block, slot) in enumerate(zip(objects.tolist(), blocks.tolist(), slots.tolist(), strict=True)):
        runs = OBJECTS[number]
        want = torch.cat([source[layer][block, start : start + heads].reshape(-1) for layer, start, heads in runs])
        assert torch.equal(rows[slot, : SIZES[number]], want), item
        assert bool((rows[slot, SIZES[number] :] == POISON).all())
    assert bool((rows[[1, 5, 7]] == POISON).all())
    unpacking.unpack(objects, blocks, rows, slots)
    expected = [torch.full_like(layer, POISON) for layer in target]
    for number, block in zip(objects.tolist(), blocks.tolist(), strict=True):
        for layer, start, heads in OBJECTS[number]:
            expected[layer][block, start : start + heads] = source[layer][block, start : start + heads]
    assert all(torch.equal(layer, want) for layer, want in zip(target, expected, strict=True))


def test_places_and_rows_of_their_own() -> None:
    """Runs with gaps between them, and rows in order when none are named."""
    layers = _labelled("LBHNC")
    made = choice.kernels_for(layers, OBJECTS, [[0, 100], None, None, [7]])
    assert made.sizes == (196, SIZES[1], SIZES[2], 85)
    rows = torch.full((2, 400), POISON, dtype=torch.uint8)
    made.pack(torch.tensor([3, 0]), torch.tensor([1, 2]), rows)
    assert torch.equal(rows[0, 7:85], layers[3][1, 0].reshape(-1))
    assert torch.equal(rows[1, 100:196], layers[2][2, 0].reshape(-1))
    assert bool((rows[1, 96:100] == POISON).all())


def test_numbers_that_do_not_exist_are_refused_before_anything_is_written() -> None:
    """Also when they belong to one form only."""
    layers = _labelled("LBHNC")
    made = choice.kernels_for(layers, OBJECTS)
    rows = torch.full((2, 400), POISON, dtype=torch.uint8)
    for objects, blocks, slots in (([0, 9], [1, 1], [0, 1]), ([0, 1], [1, BLOCKS], [0, 1]), ([0, 1], [1, 1], [0, 2])):
        with pytest.raises(ValueError, match="given"):
            made.pack(torch.tensor(objects), torch.tensor(blocks), rows, torch.tensor(slots))
    assert bool((rows == POISON).all())


def test_one_form_and_objects_of_mixed_forms_take_no_detour() -> None:
    """What is made today for layers of one form stays what is made."""
    layers = _labelled("LBHNC")
    assert not several(layers[::2], [[(0, 0, 1), (1, 0, 1)]])
    assert not several(layers, [[(0, 0, 1), (1, 0, 1)]])
    assert not several(layers, [])
    assert not isinstance(choice.kernels_for(layers[::2], [[(0, 0, 1), (1, 0, 1)]]), Forms)
