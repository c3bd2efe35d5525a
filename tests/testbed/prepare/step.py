"""What a preparation step is: plain data, so that the plan can be read, counted and tested."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from testbed.prepare.command import Commands


@dataclass(frozen=True)
class Step:
    """One step of the preparation.

    Attributes:
        name: what appears in the progress line.
        done: tells, quickly and without changing anything, whether the result is there.
        action: makes the result; called only when `done` says no. Safe to interrupt at any point.
        remedy: what a person can do when it fails.
    """

    name: str
    done: Callable[[], bool]
    action: Callable[[Commands], None]
    remedy: str


class UnpreparableError(Exception):
    """The machine lacks something that preparation cannot bring; the text says what to do."""


IGNORED = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"}


def key_of(*parts: object) -> str:
    """Twelve hexadecimal digits that change when any part changes.

    A `Path` part stands for the names and bytes of the file or of all files below the folder; every other part
    stands for its text.
    """
    digest = hashlib.sha256()
    for part in parts:
        for chunk in _chunks(part):
            digest.update(len(chunk).to_bytes(8, "big"))
            digest.update(chunk)
    return digest.hexdigest()[:12]


def _chunks(part: object) -> Iterable[bytes]:
    if not isinstance(part, Path):
        yield repr(part).encode()
    elif part.is_dir():
        for file in sorted(part.rglob("*")):
            if file.is_file() and not IGNORED.intersection(file.parts):
                yield str(file.relative_to(part)).encode()
                yield file.read_bytes()
    elif part.exists():
        yield part.name.encode()
        yield part.read_bytes()
    else:
        yield f"absent {part.name}".encode()
