"""Arena: the staging buffer of a rank, cut into halves that are lent one at a time.

Lends, never decides. One registered host buffer; each half is a row of equal slots, one canonical object each. While
one half is in the store's hands the other is packed.
"""

import queue
import threading
import time
from dataclasses import dataclass

import torch

from kvshare_layout.checks import STAGING_PARTS

#: Halves per direction.
HALVES = STAGING_PARTS // 2


@dataclass(frozen=True)
class Half:
    """Part of the arena.

    Attributes:
        memory: uint8 ``[slots, slot_bytes]``.
    """

    memory: torch.Tensor

    @property
    def slots(self) -> int:
        """Number of objects that fit."""
        return int(self.memory.shape[0])

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return int(self.memory.shape[1])

    def address(self, slot: int) -> int:
        """Address of a slot."""
        return int(self.memory.data_ptr()) + slot * int(self.memory.stride(0))


class Lender:
    """The halves of one direction."""

    def __init__(self, halves: list[Half]) -> None:
        self._free: queue.SimpleQueue[Half | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}
        self._most = self._waits = 0
        self._waited = 0.0
        self.slots = halves[0].slots if halves else 0
        for half in halves:
            self._free.put(half)

    def borrow(self, slots: int | None = None) -> Half | None:
        """Wait for a free half; None once the arena is closed.

        Args:
            slots: how many of its slots will be used, for the figures; all of them when not given.
        """
        started = time.monotonic()
        try:
            half, waited = self._free.get_nowait(), 0.0
        except queue.Empty:
            half, waited = self._free.get(), time.monotonic() - started
        if half is None:
            self._free.put(None)
            return None
        with self._lock:
            self._used[id(half)] = (half.slots if slots is None else slots) * int(half.memory.stride(0))
            self._most = max(self._most, sum(self._used.values()))
            self._waits += waited > 0
            self._waited += waited
        return half

    def give_back(self, half: Half) -> None:
        """Return a half."""
        with self._lock:
            self._used.pop(id(half), None)
        self._free.put(half)

    @property
    def used_bytes(self) -> int:
        """Bytes that are lent now."""
        with self._lock:
            return sum(self._used.values())

    @property
    def most_bytes(self) -> int:
        """Most bytes that were lent at a time."""
        with self._lock:
            return self._most

    def take_waits(self) -> tuple[int, float]:
        """How often somebody had to wait since the last call, and for how many seconds."""
        with self._lock:
            taken = self._waits, self._waited
            self._waits, self._waited = 0, 0.0
            return taken

    def close(self) -> None:
        """Wake everybody who waits."""
        self._free.put(None)


class Arena:
    """One host buffer for both directions.

    Args:
        total_bytes: bytes of the buffer.
        pinned: whether the memory is page-locked, for devices that copy from the host.
    """

    def __init__(self, total_bytes: int, *, pinned: bool = False) -> None:
        self.buffer = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.send = Lender([])
        self.receive = Lender([])

    def cut(self, slot_bytes: int) -> None:
        """Cut the buffer into slots of ``slot_bytes``, the same number in each of the four halves.

        Raises:
            ValueError: not even one slot per half fits.
        """
        if slot_bytes == 0:
            return
        quarter = self.buffer.numel() // (2 * HALVES)
        slots = quarter // slot_bytes
        if slots == 0:
            raise ValueError(
                f"a staging arena of {self.buffer.numel()} bytes given for objects of {slot_bytes} bytes, at least "
                f"{2 * HALVES * slot_bytes} expected: raise staging_bytes"
            )
        halves = [
            Half(self.buffer[i * quarter : i * quarter + slots * slot_bytes].view(slots, slot_bytes))
            for i in range(2 * HALVES)
        ]
        self.send, self.receive = Lender(halves[:HALVES]), Lender(halves[HALVES:])

    def close(self) -> None:
        """Wake all waiting threads."""
        self.send.close()
        self.receive.close()
