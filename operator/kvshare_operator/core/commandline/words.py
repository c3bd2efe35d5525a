"""Words of a command line, some of which cannot be known at admission time.

Why this exists: `$(VAR)` and `$VAR` may come from a ConfigMap or from a program's output. Such a piece is
kept as the character ``HOLE`` inside the word's text, so that `--tensor-parallel-size=$(TP)` still shows
which option it is. Expansion here is Kubernetes' own rule for `$(VAR)`, not a shell's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

HOLE: Final = "\0"
"""Stands for text that is not known."""
SPILL: Final = "\1"
"""Stands for text that is not known and may be any number of words: an unquoted shell expansion."""
OURS: Final = "\2"
"""Stands for an expansion of our own variable in a shell script."""

MOST_CHARACTERS: Final = 64 * 1024
"""Longer texts are not read: a variable of variables of variables can grow without end, and no engine needs it."""
MOST_WORDS: Final = 4096

_REFERENCE: Final = re.compile(r"\$(\$|\(([^)]{0,1024})\))")
_NAME: Final = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
_SERVICE: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_\w+)?$")


@dataclasses.dataclass(frozen=True)
class Environment:
    """What is known about a container's variables.

    ``values`` holds the known ones; a name mapped to None is set, to something unknown. ``open`` tells that
    other variables may exist as well (envFrom). ``plain`` are unknown ones that mean nothing to a shell: addresses,
    names, numbers.
    """

    values: Mapping[str, str | None]
    open: bool = False
    plain: frozenset[str] = frozenset()

    def without(self, names: Iterable[str]) -> Environment:
        """Return the same environment with ``names`` set to something unknown."""
        return dataclasses.replace(self, values={**self.values, **dict.fromkeys(names)})


def environment(container: Mapping[str, Any]) -> Environment:
    """Read ``env`` and ``envFrom`` of a container; each value may refer to the entries before it."""
    values: dict[str, str | None] = {}
    plain: set[str] = set()
    is_open = bool(container.get("envFrom"))
    for entry in container.get("env") or []:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            continue
        if entry.get("valueFrom") is not None:
            values[entry["name"]] = None
            if _is_plain(entry["valueFrom"]):
                plain.add(entry["name"])
            continue
        plain.discard(entry["name"])
        text = expand(str(entry.get("value") or ""), Environment(values, is_open))
        values[entry["name"]] = None if HOLE in text else text
    return Environment(values, is_open, frozenset(plain))


def _is_plain(source: Any) -> bool:
    """Whether a `valueFrom` is a fact about the pod in letters, digits, dots, colons and the like."""
    if not isinstance(source, Mapping):
        return False
    field = source.get("fieldRef")
    return "resourceFieldRef" in source or (
        isinstance(field, Mapping) and not str(field.get("fieldPath", "")).startswith("metadata.annotations")
    )


def unseen(container: Mapping[str, Any], env: Environment) -> str | None:
    """Return a `$(VAR)` of a container's command line that may stand for any text; None when there is none."""
    for word in (*(container.get("command") or []), *(container.get("args") or [])):
        holes, reference = expand(str(word), env).count(HOLE), ""
        for reference, name in ((match[0], match[2] or "") for match in _REFERENCE.finditer(str(word))):
            if env.values.get(name) is None and HOLE in expand(reference, env):
                if name not in env.plain and (name in env.values or not _SERVICE.search(name)):
                    return reference
                holes -= 1
        if holes > 0:  # the word grows too long
            return reference
    return None


def expand(text: str, env: Environment) -> str:
    """Expand `$(VAR)` as the kubelet does: `$$` is a dollar, an unset name stays as it is written.

    What is set to something unknown, or may be set by envFrom or by a Service, becomes ``HOLE``; so does what would
    make the text longer than ``MOST_CHARACTERS``.
    """
    length = len(text)

    def piece(match: re.Match[str]) -> str:
        nonlocal length
        if match[1] == "$":
            return "$"
        name = match[2]
        if name in env.values:
            value = env.values[name]
            length += len(value or "")
            return HOLE if value is None or length > MOST_CHARACTERS else value
        may_exist = _NAME.fullmatch(name) and (env.open or _SERVICE.search(name))
        return HOLE if may_exist else match[0]

    return _REFERENCE.sub(piece, text)


def argv(container: Mapping[str, Any], env: Environment) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (command, args) of a container as words, `$(VAR)` expanded."""
    command, args = (
        tuple(expand(str(word), env) for word in container.get(field) or []) for field in ("command", "args")
    )
    return command, args
