"""README and `docs/` as tests see them: fenced blocks with their place, and shell blocks as commands.

What this file reads is what people copy; the tests in `documentation/` decide what must be true of it.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("kvshare", "make", "kubectl", "helm", "pip", "docker", "git", "python3")
"""Words that begin a command; any other first line makes an untagged block output or a file."""
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)
_OPERATORS = {"|", "&&", "||", ";", ">", ">>", "<"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block. ``line`` is its fence's, counted from 1."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """`docs/page.md:12`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def documents(self) -> list[Any]:
        """Return the YAML documents that are not empty."""
        return [one for one in yaml.safe_load_all(self.text) if one is not None]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, also those inside lists."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], textwrap.dedent(match["body"]))
        for match in _FENCE.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


@dataclasses.dataclass(frozen=True)
class Command:
    """One program with its arguments, as a shell would start it."""

    place: str
    words: tuple[str, ...]


def commands(block: Block) -> list[Command]:
    """Return the commands of a shell block; in `console` blocks only lines with `$`, the rest is output.

    Assignments in front of a command, comments, and what stands behind a redirection are left out.
    """
    out = []
    for line in _lines(block):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        current: list[str] = []
        redirected = False
        for word in [*lexer, ";"]:
            if word in _OPERATORS:
                if word in (">", ">>", "<"):
                    redirected = True
                    continue
                if current:
                    out.append(Command(block.place, tuple(current)))
                current, redirected = [], False
            elif redirected:
                redirected = False
            elif current or not re.fullmatch(r"\w+=.*", word):
                current.append(word)
    return out


def _lines(block: Block) -> list[str]:
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    if block.language == "console" or any(line.startswith("$ ") for line in lines):
        return [line[2:] for line in lines if line.startswith("$ ")]
    if block.language in ("sh", "bash", "shell"):
        return _joined(lines)
    first = text.split()[:1]
    return _joined(lines) if block.language == "" and first and first[0] in PROGRAMS else []


def _joined(lines: list[str]) -> list[str]:
    """Join lines inside an open quotation."""
    out: list[str] = []
    for line in lines:
        if out and _open(out[-1]):
            out[-1] += "\n" + line
        else:
            out.append(line)
    return out


def _open(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


COMMANDS = [command for block in ALL for command in commands(block)]


def of(program: str) -> list[Any]:
    """Return the commands of one program as named test parameters."""
    import pytest

    return [
        pytest.param(one, id=f"{one.place} {' '.join(one.words)[:60]}")
        for one in COMMANDS
        if one.words[0].rsplit("/", 1)[-1] == program
    ]
