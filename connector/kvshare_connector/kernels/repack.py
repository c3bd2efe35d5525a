"""Repack: pack and unpack with Triton, one launch for a batch of objects over all layers.

Imports torch and triton only; ``naive`` beside it says what is right. Nothing is compiled until the first launch.

Shape notes: a layer is ``[B, H, R, M, C]`` bytes with any strides and a dense C, where a block of N tokens is R kernel
blocks of M; a run is dense ``[heads, N, C]`` inside an object. A program copies ``ROWS`` of the ``heads * N`` cells of
one run of one item. Strides and sizes are in words of the widest type that divides every address, stride and size;
addresses are in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvshare_connector.kernels.naive import Run
from kvshare_connector.kernels.plain import check_items

#: Bytes that may divide everything, and the word that is then copied: two words at once where 16 do.
_WORDS = {16: (tl.int64, 8), 8: (tl.int64, 8), 4: (tl.int32, 4), 2: (tl.int16, 2), 1: (tl.uint8, 1)}
#: Words of one program's tile.
_TILE_WORDS = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    p_items, p_objects, p_runs, p_layers, N, M, C,  # noqa: N803
    UNPACK: tl.constexpr, WORD: tl.constexpr, BYTES: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # p_items [n, 3]: object, block, address of the row. p_objects [o, 2]: first run, runs.
    # p_runs [r, 4]: layer, first head, heads, offset in the object. p_layers [l, 5]: address, strides of B, H, R, M.
    i_item = tl.program_id(0).to(tl.int64)
    i_run = tl.program_id(1).to(tl.int64)
    i_tile = tl.program_id(2).to(tl.int64)
    i_object = tl.load(p_items + i_item * 3)
    i_block = tl.load(p_items + i_item * 3 + 1)
    row = tl.load(p_items + i_item * 3 + 2)
    # Objects with fewer runs than the grid has room for: the surplus programs copy no heads.
    m_run = i_run < tl.load(p_objects + i_object * 2 + 1)
    p_run = p_runs + (tl.load(p_objects + i_object * 2) + i_run) * 4
    i_layer = tl.load(p_run, mask=m_run, other=0)
    head_start = tl.load(p_run + 1, mask=m_run, other=0)
    heads = tl.load(p_run + 2, mask=m_run, other=0)
    offset = tl.load(p_run + 3, mask=m_run, other=0)
    p_layer = p_layers + i_layer * 5
    base = tl.load(p_layer)
    stride_b = tl.load(p_layer + 1)
    stride_h = tl.load(p_layer + 2)
    stride_r = tl.load(p_layer + 3)
    stride_m = tl.load(p_layer + 4)

    o_cell = i_tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
    m_cell = o_cell < heads * N
    o_head = head_start + o_cell // N
    o_token = o_cell % N
    o_place = o_head * stride_h + o_token // M * stride_r + o_token % M * stride_m
    b_cache = base + (i_block * stride_b + o_place) * BYTES
    b_row = row + (offset + o_cell * C) * BYTES
    p_cells = b_cache.to(tl.pointer_type(WORD))[:, None]
    p_bytes = b_row.to(tl.pointer_type(WORD))[:, None]
    for start in range(0, C, WIDTH):
        o_word = start + tl.arange(0, WIDTH).to(tl.int64)[None, :]
        mask = m_cell[:, None] & (o_word < C)
        # Every cell starts at a multiple of ALIGN: said here, because the compiler cannot see it in a table.
        p_cache = tl.multiple_of(p_cells + o_word, [BYTES, ALIGN])
        p_row = tl.multiple_of(p_bytes + o_word, [BYTES, ALIGN])
        if UNPACK:
            tl.store(p_cache, tl.load(p_row, mask=mask), mask=mask)
        else:
            tl.store(p_row, tl.load(p_cache, mask=mask), mask=mask)


@dataclass(frozen=True)
class Batch:
    """A batch that is ready to be launched; its rows must stay where they are until then.

    Attributes:
        items: int64 ``[n, 3]`` on the device: object, block, address of the row.
        align: what divides every address, one of ``_WORDS``.
    """

    items: torch.Tensor
    align: int


class Repack:
    """Pack and unpack for one rank: its layers and objects, prepared once.

    Attributes:
        sizes: bytes of each object.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        objects: Sequence[Sequence[Run]],
        places: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        """Check and tabulate.

        Args:
            layers: uint8 ``[B, H, N, C]``, or ``[B, H, C]`` for one token, or ``[B, H, R, M, C]`` where a block is R
                kernel blocks of M tokens; on one device, all axes but H equal.
            objects: the runs of every object that will be asked for.
            places: of every object the first byte of each run in a row, ascending; None where they follow each other.

        Raises:
            ValueError: a tensor or a run does not fit; the text says which.
        """
        self._layers = [_five_axes(layer) for layer in layers]
        self._check_layers()
        self._blocks, _, parts, self._part, self._cell = self._layers[0].shape
        self._tokens = parts * self._part
        self._device = self._layers[0].device
        runs: list[tuple[int, int, int, int]] = []
        table: list[tuple[int, int]] = []
        sizes: list[int] = []
        for number, object_ in enumerate(objects):
            table.append((len(runs), len(object_)))
            offset = 0
            at = None if places is None else places[number]
            for i, (slot, start, heads) in enumerate(object_):
                offset = offset if at is None else at[i]
                if not 0 <= slot < len(layers) or start < 0 or heads < 1 or start + heads > self._layers[slot].shape[1]:
                    raise ValueError(f"run {(slot, start, heads)} of object {number} given, heads of a layer expected")
                runs.append((slot, start, heads, offset))
                offset += heads * self._tokens * self._cell
            sizes.append(offset)
        self.sizes = tuple(sizes)
        self._objects = self._table(table, 2)
        self._runs = torch.tensor(runs, dtype=torch.int64).view(-1, 4)
        self._most_runs = max((count for _, count in table), default=0)
        self._most_heads = max((run[2] for run in runs), default=0)
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        steps = [self._cell, *(run[3] for run in runs)]
        for layer in self._layers:
            steps += [layer.data_ptr(), *layer.stride()[:4]]
        self._word = _widest(steps)

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
        self.launch(self.prepare(objects, blocks, rows, slots), unpack=False)

    def unpack(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        """Copy the starts of rows into the layers: the inverse of ``pack``; one row may go to several blocks."""
        self.launch(self.prepare(objects, blocks, rows, slots), unpack=True)

    def prepare(
        self, objects: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
    ) -> Batch:
        """Check a batch and bring its table to the device; arguments and errors as of ``pack``."""
        places = check_items(objects, blocks, rows, slots, sizes=self.sizes, blocks_held=self._blocks)
        if rows.device != self._device:
            raise ValueError(f"rows on {rows.device} given, rows on {self._device} expected")
        align = min(self._word, _widest([rows.data_ptr(), rows.stride(0) if len(rows) > 1 else 0]))
        addresses = rows.data_ptr() + places * rows.stride(0)
        return Batch(torch.stack([objects, blocks, addresses], dim=1).contiguous().to(self._device), align)

    def launch(self, batch: Batch, *, unpack: bool) -> None:
        """Start the copy on the stream that is current."""
        if not len(batch.items) or not self._most_runs:
            return
        type_, word = _WORDS[batch.align]
        if word not in self._tables:
            self._tables[word] = self._in_words(word)
        runs, layers = self._tables[word]
        cell = self._cell // word
        width = min(_power_of_two(cell), _TILE_WORDS)
        lines = _TILE_WORDS // width
        grid = (len(batch.items), self._most_runs, -(-self._most_heads * self._tokens // lines))
        _copy[grid](
            batch.items, self._objects, runs, layers, self._tokens, self._part, cell,
            UNPACK=unpack, WORD=type_, BYTES=word, ALIGN=batch.align, ROWS=lines, WIDTH=width,
        )  # fmt: skip

    def _in_words(self, word: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of runs and layers with their sizes in words."""
        runs = self._runs.clone()
        runs[:, 3] //= word
        layers = [(x.data_ptr(), *(step // word for step in x.stride()[:4])) for x in self._layers]
        return runs.to(self._device), self._table(layers, 5)

    def _table(self, rows: Sequence[tuple[int, ...]], width: int) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64).view(-1, width).to(self._layers[0].device)

    def _check_layers(self) -> None:
        if not self._layers:
            raise ValueError("no layers given, at least one expected")
        first = self._layers[0]
        for slot, layer in enumerate(self._layers):
            if layer.dtype != torch.uint8 or layer.dim() != 5 or layer.device != first.device:
                raise ValueError(f"layer {slot}: {layer.dtype} {tuple(layer.shape)} given, bytes [B, H, N, C] expected")
            if layer.stride(4) != 1 and layer.shape[4] > 1:
                raise ValueError(f"layer {slot}: strides {layer.stride()} given, a dense last axis expected")
            if (layer.shape[0], *layer.shape[2:]) != (first.shape[0], *first.shape[2:]) or not layer.numel():
                raise ValueError(f"layer {slot}: shape {tuple(layer.shape)} given, B, N and C of layer 0 expected")


def _five_axes(layer: torch.Tensor) -> torch.Tensor:
    """``[B, H, R, M, C]`` of a layer, which may lack the last two of them; other numbers of axes stay as they are."""
    if layer.dim() == 3:
        return layer.unsqueeze(2).unsqueeze(2)
    return layer.unsqueeze(2) if layer.dim() == 4 else layer


def _widest(steps: Sequence[int]) -> int:
    """The largest of ``_WORDS`` that divides all of ``steps``."""
    return next(word for word in _WORDS if all(step % word == 0 for step in steps))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
