"""Choice: which kernels a rank uses, decided here and nowhere else.

Triton where the caches are on an accelerator, plain torch on a CPU and wherever Triton is missing, does not compile or
does not do what plain torch does. Imports torch and triton only, and triton only when it is wanted.
"""

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from kvshare_connector.kernels.forms import Forms, several
from kvshare_connector.kernels.naive import Run
from kvshare_connector.kernels.plain import Plain

logger = logging.getLogger(__name__)

#: Block that the kernels are tried with: the engine's null block, whose content means nothing.
_TRIED_BLOCK = 0


class Kernels(Protocol):
    """Pack and unpack of a batch: items are (object, block, row); see ``Plain`` for the arguments."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each object."""
        ...

    def pack(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        """From the layers into rows."""
        ...

    def unpack(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        """From rows into the layers."""
        ...


def kernels_for(
    layers: Sequence[torch.Tensor],
    objects: Sequence[Sequence[Run]],
    places: Sequence[Sequence[int] | None] | None = None,
) -> Kernels:
    """The kernels for a rank, tried once, which compiles them; on the stream that is current.

    Args:
        layers: byte views of the caches, see ``Plain``.
        objects: the runs of every object that will be asked for.
        places: where the runs lie in a row, see ``Plain``.
    """
    if several(layers, objects):
        return Forms(layers, objects, places, kernels_for)
    plain = Plain(layers, objects, places)
    if not plain.sizes or not _accelerated(layers[0].device):
        return plain
    try:
        fast: Kernels = importlib.import_module("kvshare_connector.kernels.repack").Repack(layers, objects, places)
        _try(fast, plain, layers[0].device)
    except Exception as error:  # an import, a compiler or a device may fail in any way, and caching goes on
        logger.warning(
            "blocks are packed by plain torch, which is slower: Triton cannot be used (%s: %s)",
            type(error).__name__, str(error).strip().splitlines()[0] if str(error).strip() else "no reason given",
        )  # fmt: skip
        return plain
    return fast


def _accelerated(device: torch.device) -> bool:
    """Whether Triton is wanted; on a CPU only by whoever asks Triton itself for its interpreter."""
    return str(device.type) != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


def _try(fast: Kernels, plain: Kernels, device: torch.device) -> None:
    """Pack one block of every object both ways and compare, then write it back where it came from.

    One object at a time: the engine has planned the device's memory without this.

    Raises:
        RuntimeError: the two differ.
    """
    block = torch.tensor([_TRIED_BLOCK], dtype=torch.int64)
    for number, size in enumerate(plain.sizes):
        which = torch.tensor([number], dtype=torch.int64)
        got = torch.zeros((1, -(-size // 64) * 64), dtype=torch.uint8, device=device)
        want = torch.zeros_like(got)
        fast.pack(which, block, got)
        plain.pack(which, block, want)
        if not torch.equal(got, want):
            raise RuntimeError("its copy of a block differs from the plain one")
        fast.unpack(which, block, got)
