"""CHANGELOG.md: what a version brings, and turning `Unreleased` into a version."""

import datetime
import re
from pathlib import Path

HEADING = re.compile(r"^## (\S+)(?: \((\d{4}-\d{2}-\d{2})\))?$", re.MULTILINE)
UNRELEASED = "Unreleased"


def section(text: str, name: str) -> str | None:
    """Return what stands below a version's heading; None when there is none."""
    headings = list(HEADING.finditer(text))
    for number, heading in enumerate(headings):
        if heading[1] == name:
            end = headings[number + 1].start() if number + 1 < len(headings) else len(text)
            return text[heading.end() : end].strip()
    return None


def problems(text: str, version: str) -> list[str]:
    """Say what keeps the changelog from telling about a version, which may still be under `Unreleased`."""
    told = section(text, version)
    if told is None:
        told = section(text, UNRELEASED)
    if told is None:
        return [f"CHANGELOG.md: neither a section {version!r} nor {UNRELEASED!r}: add one"]
    if not told:
        return [f"CHANGELOG.md: the section of {version} is empty: say what changed, and what an upgrade needs"]
    names = [heading[1] for heading in HEADING.finditer(text)]
    return [
        f"CHANGELOG.md: the section {name!r} is there twice: join both"
        for name in sorted(set(names))
        if names.count(name) > 1
    ]


def released(text: str, version: str, day: datetime.date) -> str:
    """Return the text with `Unreleased` as this version, and a new empty `Unreleased` above it.

    Raises:
        ValueError: nothing is unreleased, or the version has a section already.
    """
    if section(text, version) is not None:
        raise ValueError(f"CHANGELOG.md has a section {version!r} already: choose the next version")
    if not section(text, UNRELEASED):
        raise ValueError(f"CHANGELOG.md has nothing under {UNRELEASED!r}: there is nothing to release")
    heading = f"## {UNRELEASED}\n"
    return text.replace(heading, f"{heading}\n## {version} ({day:%Y-%m-%d})\n", 1)


def read(root: Path) -> str:
    """Return the changelog."""
    return (root / "CHANGELOG.md").read_text()
