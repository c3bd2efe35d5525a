"""Lookup: what the scheduler may answer about a request right now.

Pure state per request: asking, answered, bypassed. The clock is an argument. Nothing here waits or calls anybody:
an unfinished question is answered "ask again", an overdue one "no hit".
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A search that somebody must carry out: the blocks of a request from ``start`` on."""

    request_id: str
    serial: int
    start: int
    block_hashes: tuple[bytes, ...]


@dataclass
class _State:
    serial: int
    start: int
    end: int
    asked_at: float
    preemptions: int
    found: int | None = None
    answered_at: float = 0.0


class Lookups:
    """The state of all lookups of one engine.

    Args:
        timeout: seconds after which an unanswered question counts as a miss.
        reuse: seconds that a positive answer may be used; less than half a lease of the store.
        forget: seconds that a hash whose GET failed counts as missing.
    """

    def __init__(self, *, timeout: float, reuse: float, forget: float) -> None:
        self._timeout, self._reuse, self._forget = timeout, reuse, forget
        self._states: dict[str, _State] = {}
        self._bypassed: set[str] = set()
        self._missing: dict[bytes, float] = {}
        self._serial = 0
        self.timeouts = 0

    def ask(
        self,
        request_id: str,
        start: int,
        hashes: tuple[bytes, ...],
        now: float,
        *,
        preemptions: int = 0,
        whole: bool = False,
    ) -> int | Question | None:
        """How many blocks from ``start`` on are in the store.

        Args:
            request_id: the request.
            start: first block of interest: what the local cache already holds.
            hashes: hashes of all blocks that may be loaded, from block 0 on.
            now: a monotonic clock.
            preemptions: how often the request has lost its blocks; what was saved of them since may be found now.
            whole: a hit cannot be shortened, because a shorter one may need blocks that nobody has looked for.

        Returns:
            a number of blocks; or a question that must be asked first; or None while one is under way.
        """
        if request_id in self._bypassed or start >= len(hashes):
            return 0
        state = self._states.get(request_id)
        if state is not None and state.preemptions == preemptions and self._usable(state, start, len(hashes), now):
            if state.found is None:
                if now - state.asked_at <= self._timeout:
                    return None
                state.found, state.answered_at = 0, now
                self.timeouts += 1
            end = self._cut(hashes, state, now)
            if whole and end < state.start + state.found:
                return 0
            return max(0, end - start)
        self._serial += 1
        self._states[request_id] = _State(self._serial, start, len(hashes), now, preemptions)
        return Question(request_id, self._serial, start, hashes[start:])

    def _usable(self, state: _State, start: int, end: int, now: float) -> bool:
        if state.start > start:
            return False
        if state.found is None:
            return True
        if state.found == 0:
            return end <= state.end or now - state.answered_at <= self._reuse
        return now - state.answered_at <= self._reuse

    def _cut(self, hashes: tuple[bytes, ...], state: _State, now: float) -> int:
        """End of the hit, shortened at the first block whose GET failed a moment ago."""
        end = state.start + (state.found or 0)
        for number in range(state.start, min(end, len(hashes))):
            since = self._missing.get(hashes[number])
            if since is not None and now - since <= self._forget:
                return number
        return end

    def answer(self, request_id: str, serial: int, found: int, now: float) -> None:
        """The result of a question. Late answers, and answers about requests that have gone, are ignored."""
        state = self._states.get(request_id)
        if state is not None and state.serial == serial and state.found is None:
            state.found, state.answered_at = found, now

    def bypass(self, request_id: str) -> None:
        """A load failed: no hit for this request until it has been allocated without external tokens, or ends."""
        self._bypassed.add(request_id)
        self._states.pop(request_id, None)

    def load_failed(self, hashes: tuple[bytes, ...], now: float) -> None:
        """Blocks that could not be read count as missing for a moment."""
        self._missing = {h: t for h, t in self._missing.items() if now - t <= self._forget}
        self._missing.update(dict.fromkeys(hashes, now))

    def allocated_without_hit(self, request_id: str) -> None:
        """The engine allocated blocks and will compute: the bypass has served its purpose."""
        self._bypassed.discard(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._states.pop(request_id, None)
        self._bypassed.discard(request_id)

    def forget_answers(self) -> None:
        """The cache was emptied: every answer is void, also those still under way."""
        self._states.clear()

    @property
    def open(self) -> Mapping[str, int]:
        """Serial numbers of unanswered questions by request."""
        return {request: state.serial for request, state in self._states.items() if state.found is None}
