"""Repacking: blocks of the cache into the canonical form in staging memory, and back."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvshare_connector.kernels.choice import Kernels, kernels_for
from kvshare_connector.worker.arena import Half
from kvshare_connector.worker.device import Lane
from kvshare_connector.worker.items import Item
from kvshare_connector.worker.plan import RankPlan


class Repacking:
    """Runs the kernels of one rank.

    Args:
        plan: the rank's objects.
        lane: the device.
    """

    def __init__(self, plan: RankPlan, lane: Lane) -> None:
        self._plan, self._lane = plan, lane
        numbers = iter(range(len(plan.parts)))
        self._parts = {
            planned.held.id: [(next(numbers), part.group) for part in planned.parts] for planned in plan.objects
        }
        self._made: Kernels | None = None
        self._making = threading.Lock()

    def gather(self, batch: Sequence[Item], half: Half, event: Any) -> None:
        """Pack a batch into the slots of ``half``, in its order, behind ``event`` of the device."""
        with torch.inference_mode(), self._lane.after(event):
            kernels = self._kernels()
            step = self._lane.rows_at_once(half.slot_bytes)
            for start in range(0, len(batch), step):
                end = min(start + step, len(batch))
                rows = half.memory[start:end]
                scratch = self._lane.scratch(rows)
                objects, blocks, places = self._tabulate(enumerate(batch[start:end]))
                kernels.pack(objects, blocks, scratch, places)
                self._lane.to_arena(scratch, rows)

    def scatter(self, packed: Sequence[Item], chosen: Sequence[int], half: Half) -> None:
        """Unpack the items in the slots ``chosen``; slot i of ``half`` holds ``packed[i]``."""
        with torch.inference_mode(), self._lane.after(None):
            step = self._lane.rows_at_once(half.slot_bytes)
            for start in range(0, len(packed), step):
                inside = [(slot - start, packed[slot]) for slot in chosen if start <= slot < start + step]
                if not inside:
                    continue
                rows = half.memory[start : min(start + step, len(packed))]
                scratch = self._lane.scratch(rows)
                self._lane.from_arena(rows, scratch)
                objects, blocks, slots = self._tabulate(inside)
                self._kernels().unpack(objects, blocks, scratch, slots)

    def _kernels(self) -> Kernels:
        """The kernels, compiled by the thread that needs them first: the engine's own never waits for a compiler."""
        with self._making:
            if self._made is None:
                parts = self._plan.parts
                self._made = kernels_for(self._plan.layers, [p.runs for p in parts], [p.places for p in parts])
            return self._made

    def _tabulate(self, items: Iterable[tuple[int, Item]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers of the parts, their blocks, and the rows of ``(row, item)``: int64 ``[n]`` each."""
        table = [
            (number, item.block_ids[group], row)
            for row, item in items
            for number, group in self._parts[item.planned.held.id]
        ]
        objects, blocks, rows = torch.tensor(table, dtype=torch.int64).view(-1, 3).unbind(1)
        return objects.contiguous(), blocks.contiguous(), rows.contiguous()
