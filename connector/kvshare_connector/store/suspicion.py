"""Suspicion: when a client object has to be replaced by a new one.

Pure bookkeeping over codes and a clock that is passed in. A client whose queues to one node have wedged answers
``-800`` for that node for ever, while the master still reports the objects; a new client object works. A dead node
looks the same until the master forgets it (10 s by default), so trouble must last longer than that.
"""

from collections.abc import Sequence

from kvshare_connector.store.codes import Reaction, explain

#: Trouble must last this long; longer than a master's default ``--client_ttl`` of 10 s.
LASTS_SECONDS = 12.0
#: ... and be seen in this many calls.
CALLS = 3
#: ... and calls older than this are forgotten.
WINDOW_SECONDS = 60.0
#: At most one new client object in this time.
PAUSE_SECONDS = 30.0


class Suspicion:
    """Calls with reasons to reopen. Not thread-safe: the owner holds a lock."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._last_alarm: float | None = None

    def watch(self, keys: Sequence[str], results: Sequence[int], now: float) -> tuple[str, ...]:
        """Take note of a transfer's results; return the keys that cast doubt when it is time to look closer.

        The caller then asks the store whether one of them still exists, and reopens the client if so. Calls without
        trouble prove nothing: they may have gone to another node.
        """
        doubtful = tuple(k for k, code in zip(keys, results, strict=True) if explain(code).reaction is Reaction.REOPEN)
        if not doubtful:
            return ()
        self._times = [*(t for t in self._times if now - t <= WINDOW_SECONDS), now]
        rested = self._last_alarm is None or now - self._last_alarm >= PAUSE_SECONDS
        if len(self._times) >= CALLS and now - self._times[0] >= LASTS_SECONDS and rested:
            self._last_alarm, self._times = now, []
            return doubtful
        return ()
