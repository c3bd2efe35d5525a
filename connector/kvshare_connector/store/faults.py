"""Faults: what can be made to go wrong in a ``MemoryStore``, one rule at a time.

May live here: rules and their bookkeeping. They decide by operation and key; they do not touch objects.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: Operations of a store that rules can name.
OPERATIONS = ("put", "get", "exists", "remove")

Matches = Callable[[str], bool]
Hook = Callable[[str, Sequence[str]], None]


def _match(keys: str | Sequence[str] | Matches | None) -> Matches:
    if keys is None:
        return lambda _: True
    if callable(keys):
        return keys
    wanted = frozenset([keys] if isinstance(keys, str) else keys)
    return wanted.__contains__


@dataclass
class _Rule:
    operation: str
    matches: Matches
    left: int | None
    code: int | None = None
    missing: int = 0

    def take(self, operation: str, key: str) -> bool:
        if operation != self.operation or self.left == 0 or not self.matches(key):
            return False
        if self.left is not None:
            self.left -= 1
        return True


@dataclass
class Faults:
    """Rules of one store, all empty at first. Safe to change while calls run.

    Attributes:
        duplicates_fill_last: as in Mooncake itself, a key given twice in one GET fills its last destination only,
            although both are reported as read.
    """

    duplicates_fill_last: bool = False
    _rules: list[_Rule] = field(default_factory=list)
    _hooks: list[tuple[str, Hook]] = field(default_factory=list)
    _gates: list[tuple[str, Matches, threading.Event]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(
        self, operation: str, code: int, keys: str | Sequence[str] | Matches | None = None, times: int | None = None
    ) -> None:
        """Answer ``code`` for matching keys; ``times`` answers only, or for ever. Nothing is stored or read then."""
        self._add(_Rule(operation, _match(keys), times, code=code))

    def shorten(
        self, missing: int, keys: str | Sequence[str] | Matches | None = None, times: int | None = None
    ) -> None:
        """Let a GET of matching keys fill and report ``missing`` bytes less than the object has."""
        self._add(_Rule("get", _match(keys), times, missing=missing))

    def hang(self, operation: str, keys: str | Sequence[str] | Matches | None = None) -> threading.Event:
        """Let every call with a matching key wait until the returned event is set."""
        gate = threading.Event()
        self._check(operation)
        with self._lock:
            self._gates.append((operation, _match(keys), gate))
        return gate

    def before(self, operation: str, hook: Hook) -> None:
        """Run ``hook(operation, keys)`` before every call: to evict, to sleep, to stop a clock, to raise."""
        self._check(operation)
        with self._lock:
            self._hooks.append((operation, hook))

    def clear(self) -> None:
        """Forget all rules and release everything that hangs."""
        with self._lock:
            gates, self._gates = self._gates, []
            self._rules, self._hooks, self.duplicates_fill_last = [], [], False
        for _, _, gate in gates:
            gate.set()

    def enter(self, operation: str, keys: Sequence[str]) -> None:
        """Called by the store at the start of a call, without any lock held."""
        with self._lock:
            hooks = [hook for name, hook in self._hooks if name == operation]
            gates = [gate for name, matches, gate in self._gates if name == operation and any(map(matches, keys))]
        for hook in hooks:
            hook(operation, keys)
        for gate in gates:
            gate.wait()

    def code(self, operation: str, key: str) -> int | None:
        """The code that a rule wants for this key, if any."""
        with self._lock:
            rule = next((r for r in self._rules if r.code is not None and r.take(operation, key)), None)
        return rule.code if rule else None

    def missing(self, key: str) -> int:
        """How many bytes of this key a GET leaves out."""
        with self._lock:
            rule = next((r for r in self._rules if r.missing and r.take("get", key)), None)
        return rule.missing if rule else 0

    def _add(self, rule: _Rule) -> None:
        self._check(rule.operation)
        with self._lock:
            self._rules.append(rule)

    @staticmethod
    def _check(operation: str) -> None:
        if operation not in OPERATIONS:
            raise ValueError(f"operation {operation!r} given, one of {', '.join(OPERATIONS)} expected")
