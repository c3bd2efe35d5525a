"""Batches: how many keys and segments go into one call, and how many segments may be in flight.

Pure cutting of index lists, and one counter shared by the threads of a client. Knows nothing of Mooncake.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

#: Most keys of one call that moves no bytes.
MOST_NAMES = 4096


@dataclass(frozen=True)
class Limits:
    """What one client may ask at once.

    Attributes:
        keys: most keys of one transfer call.
        segments: most segments of one transfer call.
        in_flight: most segments of all calls of a client together.
    """

    keys: int
    segments: int
    in_flight: int


#: Larger batches gain nothing and age out leases; Mooncake's default queues wedge a client for good at about 2,048
#: segments.
WIDE = Limits(keys=64, segments=1024, in_flight=1024)
#: Mooncake opens this many connections to a node over TCP; it accepts no larger number.
LANES = 16
#: Segments queue behind each other on a connection, and to a node that hangs each waits for its own timeout: with 64 of
#: them on 4 connections a call took 60 s, with one on each connection 4 s. Two such calls fill the connections, and
#: move objects of 64 KiB to 2 MiB as fast as two of 64 keys.
OVER_TCP = Limits(keys=LANES // 2, segments=LANES // 2, in_flight=LANES)


def rounds_without_repeats(keys: Sequence[str]) -> Iterator[list[int]]:
    """Indices of ``keys`` in rounds: within a round no key comes twice, and the first of equal keys comes first."""
    seen: dict[str, int] = {}
    rounds: list[list[int]] = []
    for index, key in enumerate(keys):
        turn = seen.get(key, 0)
        seen[key] = turn + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(index)
    yield from rounds


def cut(indices: Sequence[int], segments: Sequence[int], limits: Limits = WIDE) -> Iterator[list[int]]:
    """Cut ``indices`` into calls within ``limits``.

    Args:
        indices: which keys, in order.
        segments: number of segments of every key, by index. A key with more than the limit gets a call of its own.
        limits: of a call.
    """
    batch: list[int] = []
    total = 0
    for index in indices:
        if batch and (len(batch) == limits.keys or total + segments[index] > limits.segments):
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += segments[index]
    if batch:
        yield batch


class InFlight:
    """Counts the segments in flight of one client and makes callers wait for room, first come, first served."""

    def __init__(self, limit: int = WIDE.in_flight) -> None:
        self._limit = limit
        self._used = 0
        self._queue: list[object] = []
        self._changed = threading.Condition()

    @contextmanager
    def room(self, segments: int) -> Iterator[None]:
        """Hold room for ``segments``; more than the limit waits until nothing else is in flight."""
        wanted = min(segments, self._limit)
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(lambda: self._queue[0] is ticket and self._used + wanted <= self._limit)
                self._used += wanted
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._used -= wanted
                self._changed.notify_all()
