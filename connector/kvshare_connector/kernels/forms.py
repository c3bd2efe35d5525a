"""Forms: layers of several forms as one, with kernels of its own for each form.

Imports torch only. A kernel copies cells of one size and blocks of one number of tokens; layers with a second cache
have two of each. No object has layers of both, so every item belongs to one of the kernels.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kvshare_connector.kernels.naive import Run
from kvshare_connector.kernels.plain import check_items

if TYPE_CHECKING:
    from kvshare_connector.kernels.choice import Kernels

    Make = Callable[[Sequence[torch.Tensor], Sequence[Sequence[Run]], Sequence[Sequence[int] | None] | None], Kernels]


def _form(layer: torch.Tensor) -> tuple[int, ...]:
    """What all layers of a kernel have in common: everything but their heads."""
    return (layer.shape[0], *layer.shape[2:])


def several(layers: Sequence[torch.Tensor], objects: Sequence[Sequence[Run]]) -> bool:
    """Whether the objects have several forms, and each of them one."""
    forms = [{_form(layers[slot]) for slot, _, _ in runs} for runs in objects]
    return len(set().union(*forms)) > 1 and all(len(found) == 1 for found in forms)


class Forms:
    """Pack and unpack for one rank: its layers and objects, of several forms.

    Attributes:
        sizes: bytes of each object.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        objects: Sequence[Sequence[Run]],
        places: Sequence[Sequence[int] | None] | None,
        make: "Make",
    ) -> None:
        """Make the kernels of every form.

        Args:
            layers: byte views of the caches, see ``Plain``.
            objects: the runs of every object that will be asked for, each with layers of one form.
            places: where the runs lie in a row, see ``Plain``.
            make: makes kernels for layers of one form, with these three arguments.
        """
        of: dict[tuple[int, ...], list[int]] = {}
        for number, runs in enumerate(objects):
            of.setdefault(_form(layers[runs[0][0]]), []).append(number)
        sizes = [0] * len(objects)
        self._blocks = min(form[0] for form in of)
        self._which = torch.zeros(len(objects), dtype=torch.int64)
        self._number = torch.zeros(len(objects), dtype=torch.int64)
        self._kernels: list[Kernels] = []
        for form, numbers in of.items():
            mine = [slot for slot, layer in enumerate(layers) if _form(layer) == form]
            made = make(
                [layers[slot] for slot in mine],
                [[(mine.index(slot), start, heads) for slot, start, heads in objects[number]] for number in numbers],
                None if places is None else [places[number] for number in numbers],
            )
            for i, number in enumerate(numbers):
                self._which[number], self._number[number], sizes[number] = len(self._kernels), i, made.sizes[i]
            self._kernels.append(made)
        self.sizes = tuple(sizes)

    def pack(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        """Copy items into rows; arguments and errors as of ``Plain.pack``."""
        for kernels, mine in self._parts(objects, blocks, rows, slots):
            kernels.pack(*mine[:2], rows, mine[2])

    def unpack(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        """Copy rows into the layers: the inverse of ``pack``."""
        for kernels, mine in self._parts(objects, blocks, rows, slots):
            kernels.unpack(*mine[:2], rows, mine[2])

    def _parts(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None
    ) -> "list[tuple[Kernels, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]":
        """Kernels with the objects, as they number them, the blocks and the rows of their items."""
        places = check_items(objects, blocks, rows, slots, sizes=self.sizes, blocks_held=self._blocks)
        found = []
        for which, kernels in enumerate(self._kernels):
            chosen = self._which[objects] == which
            if bool(chosen.any()):
                found.append((kernels, (self._number[objects[chosen]], blocks[chosen], places[chosen])))
        return found
