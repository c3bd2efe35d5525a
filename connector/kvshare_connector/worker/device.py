"""Device: events and streams, so that the transfer code reads the same with and without an accelerator.

Imports torch only. On the CPU everything is in order already and nothing is recorded.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

#: Bytes of device memory through which the arena is filled and read, for each thread that does so. The engine plans
#: its memory without it, so it is small; the bus is far slower than the copy inside the device.
SCRATCH_BYTES = 32 << 20


class Lane:
    """Copies between a cache and the host arena, on a stream of their own where there are streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        if device.type != "cpu":
            lowest, _ = torch.cuda.Stream.priority_range()
            self._stream = torch.cuda.Stream(device=device, priority=lowest)

    def record(self) -> Any:
        """An event behind everything that the current stream has been given; None on the CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextlib.contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Run device work behind ``event`` and leave only when it has ended on the device."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            try:
                yield
            finally:  # whatever was started must not touch memory that the caller gives back
                done = torch.cuda.Event(blocking=True)  # sleeps: the engine needs the core
                done.record(self._stream)
                done.synchronize()

    def rows_at_once(self, slot_bytes: int) -> int:
        """Rows of the arena that are packed or unpacked with one launch."""
        return sys.maxsize if self.device.type == "cpu" else max(1, SCRATCH_BYTES // slot_bytes)

    def scratch(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory on the device for ``rows`` of the arena; the rows themselves on the CPU."""
        return rows if self.device.type == "cpu" else torch.empty(rows.shape, dtype=rows.dtype, device=self.device)

    def to_arena(self, scratch: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy what was packed into ``rows``; started, not ended."""
        if scratch is not rows:
            rows.copy_(scratch, non_blocking=True)

    def from_arena(self, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """Copy ``rows`` to where they are unpacked from; started, not ended."""
        if scratch is not rows:
            scratch.copy_(rows, non_blocking=True)
