"""Lines: log lines that a person can act on, and not more of them than a person can read.

Pure apart from the logger. A failure that repeats says so at once, and then at most once in ``QUIET_SECONDS`` with the
number of times. What was counted as a failure is summarised by its reason, with what each reason means.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from kvshare_connector import counters
from kvshare_connector.store import codes
from kvshare_connector.store.codes import Reaction

logger = logging.getLogger(__name__)

#: Seconds between two lines about the same trouble.
QUIET_SECONDS = 60.0

#: What our own reasons mean; the store's are in ``codes``.
_OWN = {
    counters.SHORT_READ: "the store returned another number of bytes than the object has",
    counters.NO_CLIENT: "there is no connection to the store yet",
    counters.OVERDUE: "loads waited too long behind others, the store is slow or hangs",
    counters.RAISED: "an error of the connector, see the exception above and please report it",
}
#: Counter -> (what happened, what it costs and what to look at). Each with its reasons where the counter has any.
_TROUBLE: dict[str, tuple[str, str]] = {
    "failed_keys:get": ("keys could not be read", "their blocks were computed"),
    "failed_keys:put": ("keys could not be stored", "a later request will miss them"),
    "failed_lookups": ("lookups failed", "they count as misses; look at the store's master"),
    "lookup_timeouts": (
        "lookups took longer than lookup_timeout_seconds",
        "they count as misses; look at the load of the store's master and the network to it",
    ),
    "dropped_save_blocks": (
        "blocks were not saved, because too many were waiting already",
        "a later request will miss them; the store is full or slow, or staging_bytes is too small "
        "(kvshare_arena_waits_total)",
    ),
}


class Rarely:
    """Passes each message of a logger once, and then at most once in a while with the number held back.

    Args:
        out: the logger.
        seconds: pause after a message.
        clock: a monotonic clock.
    """

    def __init__(
        self, out: logging.Logger, *, seconds: float = QUIET_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._seconds, self._clock = out, seconds, clock
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, text: str, *args: object) -> None:
        """Say something that a person should know."""
        if (held := self._held(text)) is not None:
            self._out.warning(text + held, *args, stacklevel=2)

    def exception(self, text: str, *args: object) -> None:
        """Say it with the exception that is being handled."""
        if (held := self._held(text)) is not None:
            self._out.exception(text + held, *args, stacklevel=2)

    def over(self, *texts: str) -> bool:
        """The trouble is over: it is said at once when it comes back. True when any of it had been said."""
        with self._lock:
            found = [self._said.pop(text, None) for text in texts]
        return any(item is not None for item in found)

    def _held(self, text: str) -> str | None:
        """What to append to a message; None when it is not to be said now."""
        now = self._clock()
        with self._lock:
            said, held = self._said.get(text, (float("-inf"), 0))
            if now - said < self._seconds:
                self._said[text] = (said, held + 1)
                return None
            self._said[text] = (now, 0)
        return f" ({held} more of these since the last line)" if held else ""


class Summary:
    """Turns counters of failures into a line for each kind of trouble.

    Args:
        who: the process, for the line.
        seconds: pause after a line.
        clock: a monotonic clock.
    """

    def __init__(
        self, who: str, *, seconds: float = QUIET_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._who, self._seconds, self._clock = who, seconds, clock
        self._lock = threading.Lock()
        self._open: dict[str, Counter[str]] = {}
        self._said: dict[str, float] = {}

    def counted(self, key: str, value: float) -> None:
        """A counter has been added to; most are no trouble."""
        name, _, reason = key.rpartition(":") if key.startswith(("failed_keys:", "failed_lookups:")) else (key, "", "")
        if name not in _TROUBLE or value <= 0:
            return
        with self._lock:
            self._open.setdefault(name, Counter())[reason] += int(value)
        self.tick()

    def tick(self) -> None:
        """Say what may be said now."""
        now = self._clock()
        with self._lock:
            due = [name for name in self._open if now - self._said.get(name, float("-inf")) >= self._seconds]
            taken = {name: self._open.pop(name) for name in due}
            self._said.update(dict.fromkeys(due, now))
        for name, reasons in taken.items():
            what, cost = _TROUBLE[name]
            known = [r for r in reasons if r]
            why = "; ".join(f"{reasons[r]} {r}: {_meaning(r)}" for r in sorted(known, key=lambda r: -reasons[r]))
            level = logging.INFO if known and all(_expected(r) for r in known) else logging.WARNING
            logger.log(level, "%s: %d %s%s; %s", self._who, reasons.total(), what, f" ({why})" if why else "", cost)


_BY_NAME = {code.name: code for code in codes.CODES.values()}


def _meaning(reason: str) -> str:
    code = _BY_NAME.get(reason)
    return _OWN.get(reason) or (code.meaning if code else "the store's trouble, see its own log")


def _expected(reason: str) -> bool:
    """Whether a cache that evicts gives this answer in its normal life."""
    code = _BY_NAME.get(reason)
    return code is not None and code.reaction is Reaction.MISS
