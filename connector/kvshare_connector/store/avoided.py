"""Avoided: store nodes that nothing is read from for a while, because a call has just waited for them in vain.

Pure bookkeeping over addresses and a clock that is passed in. A node that hangs costs every call its whole timeout,
and half a lease at most may be lost to it: whoever waits behind the first call must not wait for the node again.
"""

from collections.abc import Iterable

#: A call that failed after this long has waited for a node; one to a node that is gone fails within a second.
HUNG_AFTER_SECONDS = 2.0
#: By then a master has dropped a node that stays silent (its default ``--client_ttl``), or the node is back.
AVOID_SECONDS = 10.0


class Avoided:
    """Nodes by address, and until when each is avoided. Not thread-safe: the owner holds a lock."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, nodes: Iterable[str], now: float) -> None:
        """Avoid ``nodes`` from ``now`` (seconds of any clock) on, for ``AVOID_SECONDS``."""
        self._until.update(dict.fromkeys(nodes, now + AVOID_SECONDS))

    def nodes(self, now: float) -> frozenset[str]:
        """The nodes that are avoided at ``now``."""
        self._until = {node: until for node, until in self._until.items() if until > now}
        return frozenset(self._until)
