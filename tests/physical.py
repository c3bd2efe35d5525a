"""Physical cache layouts: one storage for all layers, seen as logical tensors, as an engine allocates them."""

import torch

from poison import POISON

#: The six names of vLLM, outermost axis first.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def caches(
    layout: str,
    layers: int,
    blocks: int,
    heads: int,
    tokens: int,
    cell: int,
    *,
    pad: int = 0,
    offset: int = 0,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Poisoned storage, and the logical byte view ``[B, H, N, C]`` of every layer in it.

    Args:
        layout: one of ``LAYOUTS``.
        layers: L.
        blocks: B.
        heads: H.
        tokens: N.
        cell: C, bytes.
        pad: bytes that nobody owns behind every index of the outermost axis, as padded pages have.
        offset: bytes before the first cell.
        device: where it is; the CPU when None.
    """
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": cell}
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(layout):
        if axis == layout[0]:
            step += pad
        strides[axis] = step
        step *= sizes[axis]
    storage = torch.full((offset + step,), POISON, dtype=torch.uint8, device=device)
    views = [
        storage.as_strided(
            (blocks, heads, tokens, cell),
            tuple(strides[axis] for axis in "BHNC"),
            offset + layer * strides["L"],
        )
        for layer in range(layers)
    ]
    return storage, views


def label(layer: int, blocks: int, heads: int, tokens: int, cell: int, *, first_head: int = 0) -> torch.Tensor:
    """Bytes that name their own place: ``[B, H, N, C]`` of one layer, different for every head and block."""
    b = torch.arange(blocks).view(-1, 1, 1, 1)
    h = torch.arange(first_head, first_head + heads).view(1, -1, 1, 1)
    n = torch.arange(tokens).view(1, 1, -1, 1)
    c = torch.arange(cell).view(1, 1, 1, -1)
    mixed = layer * 1000003 + b * 7919 + h * 104729 + n * 1299709 + c * 15485863
    return ((mixed * 2654435761 >> 13) % 251).to(torch.uint8)
