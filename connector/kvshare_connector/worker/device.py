"""Device: events and streams, so that the transfer code reads the same with and without an accelerator.

Imports torch only. On the CPU everything is in order already and nothing is recorded.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


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
                done = torch.cuda.Event()
                done.record(self._stream)
                done.synchronize()

    def scratch(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory on the device for ``rows`` of the arena; the rows themselves on the CPU."""
        return rows if self.device.type == "cpu" else torch.empty(rows.shape, dtype=rows.dtype, device=self.device)
