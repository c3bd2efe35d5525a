"""Plain: pack and unpack of a batch in torch alone, for CPUs and for devices without a working Triton.

Imports torch only; ``naive`` beside it says what is right and does the work wherever the shortcut below does not apply:
layers of one allocation at equal distances are one strided tensor, so a block of an object is one copy.
"""

from collections.abc import Iterator, Sequence

import torch

from kvshare_connector.kernels import naive
from kvshare_connector.kernels.naive import Run


class Plain:
    """Pack and unpack for one rank: its layers and objects.

    Attributes:
        sizes: bytes of each object.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        objects: Sequence[Sequence[Run]],
        places: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        """Find what can be copied at once.

        Args:
            layers: uint8 ``[B, H, ..., C]`` each, on one device, the last axis dense.
            objects: the runs of every object that will be asked for.
            places: of every object the first byte of each run in a row, ascending; None where they follow each other.
                What lies between runs is left as it is.
        """
        self._layers, self._objects = list(layers), [tuple(runs) for runs in objects]
        self._blocks = min((layer.shape[0] for layer in layers), default=0)
        self._places = list(places) if places is not None else [None] * len(self._objects)
        self.sizes = tuple(
            sum(map(self._bytes, runs)) if at is None else max(map(sum, zip(at, map(self._bytes, runs), strict=True)))
            for runs, at in zip(self._objects, self._places, strict=True)
        )
        self._stacks = [
            _stack(self._layers, runs) if at is None else None
            for runs, at in zip(self._objects, self._places, strict=True)
        ]

    def _bytes(self, run: Run) -> int:
        slot, start, heads = run
        return int(self._layers[slot][0, start : start + heads].numel())

    def _pieces(self, number: int) -> Iterator[tuple[Sequence[Run], int, int]]:
        """Runs of an object that follow each other in a row, with their first byte and the one behind the last."""
        runs, at = self._objects[number], self._places[number]
        if at is None:
            yield runs, 0, self.sizes[number]
            return
        for run, start in zip(runs, at, strict=True):
            yield (run,), start, start + self._bytes(run)

    def pack(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        """Copy item i, object ``objects[i]`` of block ``blocks[i]``, to the start of row ``slots[i]``.

        Args:
            objects: int64 ``[n]`` on the CPU, numbers of objects.
            blocks: int64 ``[n]`` on the CPU.
            rows: uint8 ``[m, bytes]`` on the layers' device, at least as wide as the largest object asked for.
            slots: int64 ``[n]`` on the CPU, different rows; row i for item i when None.

        Raises:
            ValueError: numbers or rows that do not exist; nothing has been written.
        """
        for number, places, wanted in self._groups(objects, blocks, rows, slots):
            stack = self._stacks[number]
            if stack is not None:
                for row, block in zip(places, wanted, strict=True):
                    source, target = _alike(stack[:, block], rows[row, : self.sizes[number]])
                    target.copy_(source)
                continue
            for first, count, start in _neighbours(places):
                blocks_ = self._where(wanted[start : start + count])
                for runs, begin, end in self._pieces(number):
                    naive.pack(self._layers, runs, blocks_, rows[first : first + count, begin:end])

    def unpack(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        """Copy the starts of rows into the layers: the inverse of ``pack``; one row may go to several blocks."""
        for number, places, wanted in self._groups(objects, blocks, rows, slots):
            stack = self._stacks[number]
            if stack is not None:
                for row, block in zip(places, wanted, strict=True):
                    target, source = _alike(stack[:, block], rows[row, : self.sizes[number]])
                    target.copy_(source)
                continue
            for first, count, start in _neighbours(places):
                blocks_ = self._where(wanted[start : start + count])
                for runs, begin, end in self._pieces(number):
                    naive.unpack(self._layers, runs, blocks_, rows[first : first + count, begin:end])

    def _where(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self._layers[0].device)

    def _groups(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None
    ) -> Iterator[tuple[int, list[int], list[int]]]:
        """Object, rows and blocks of the items, object by object."""
        places = check_items(objects, blocks, rows, slots, sizes=self.sizes, blocks_held=self._blocks)
        for number in objects.unique().tolist():
            chosen = objects == number
            yield number, places[chosen].tolist(), blocks[chosen].tolist()


def check_items(
    objects: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor | None,
    *,
    sizes: Sequence[int],
    blocks_held: int,
) -> torch.Tensor:
    """The row of every item, int64 ``[n]``, once all numbers are known to exist.

    Raises:
        ValueError: what was given and what was expected.
    """
    count = len(objects)
    places = torch.arange(count, dtype=torch.int64) if slots is None else slots
    for name, numbers, limit in (
        ("objects", objects, len(sizes)), ("blocks", blocks, blocks_held), ("rows", places, len(rows)),
    ):  # fmt: skip
        if numbers.dtype != torch.int64 or numbers.dim() != 1 or numbers.device.type != "cpu":
            raise ValueError(f"{name}: {numbers.dtype} {tuple(numbers.shape)} given, int64 [n] on the CPU expected")
        if len(numbers) != count:
            raise ValueError(f"{count} objects and {len(numbers)} {name} given, as many expected")
        if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < limit:
            raise ValueError(f"{name}: {numbers.tolist()} given, numbers from 0 to {limit - 1} expected")
    needed = max((sizes[number] for number in objects.unique().tolist()), default=0)
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] < needed:
        raise ValueError(f"rows: {rows.dtype} {tuple(rows.shape)} given, bytes [n, {needed} or more] expected")
    if (rows.stride(1) != 1 and rows.shape[1] > 1) or (len(rows) > 1 and rows.stride(0) < needed):
        raise ValueError(f"rows: strides {rows.stride()} given, dense rows that do not overlap expected")
    return places


def _stack(layers: Sequence[torch.Tensor], runs: Sequence[Run]) -> torch.Tensor | None:
    """The runs as one strided tensor ``[runs, B, heads, ..., C]``; None when they are no such thing."""
    if not runs or len({(start, heads) for _, start, heads in runs}) != 1:
        return None
    views = [layers[slot][:, start : start + heads] for slot, start, heads in runs]
    first = views[0]
    step = views[1].data_ptr() - first.data_ptr() if len(views) > 1 else 0
    for number, view in enumerate(views):
        if (
            view.shape != first.shape
            or view.stride() != first.stride()
            or view.data_ptr() - first.data_ptr() != number * step
            or view.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
    if step < 0:
        return None
    return first.as_strided((len(runs), *first.shape), (step, *first.stride()), first.storage_offset())


def _alike(part: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of a stack and a row as tensors of one shape, of 8-byte words where everything allows it."""
    if naive.whole_words(part) and naive.whole_words(row):
        part, row = part.view(torch.int64), row.view(torch.int64)
    return part, row.view(part.shape)


def _neighbours(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut row numbers into ascending neighbours: first row, how many, and where in ``places`` they start."""
    start = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield places[start], i - start, start
            start = i
