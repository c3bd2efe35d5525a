"""vLLM's arguments, read as vLLM's own parser reads them.

Why this exists: a pod's tensor-parallel size decides what is injected, and a wrong reading would be worse
than none. So every spelling that vLLM takes is read (``--a-b 2``, ``=2``, underscores, unique abbreviations,
``-tp``, last one wins, dotted JSON flags), and everything else is *unknown*, never a default. A test compares
this reader with the installed vLLM's parser. May not know pods or pools.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final

from kvshare_operator.core.commandline import vllm_flags
from kvshare_operator.core.commandline.words import HOLE, SPILL

WATCHED: Final = (
    "--model",
    "--revision",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--decode-context-parallel-size",
    "--prefill-context-parallel-size",
    "--block-size",
    "--kv-cache-dtype",
    "--dtype",
    "--prefix-caching-hash-algo",
    "--enable-prefix-caching",
    "--config",
    "--kv-transfer-config",
    "--kv-offloading-size",
    "--nnodes",
)
"""Options whose value matters to a pool; everything else is skipped over."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """One option as it was seen: `text` is its last value; `unknown` says why it cannot be told.

    ``present`` tells an option that stands there from one that a word which cannot be seen might hold.
    """

    text: str | None = None
    unknown: str | None = None
    present: bool = False

    @property
    def given(self) -> bool:
        """Whether the option is on the command line, with a value that can be read."""
        return self.unknown is None and self.text is not None

    def number(self) -> int | None:
        """Return the value as a whole number, or None when it is unset, unknown or no number."""
        try:
            return int(self.text) if self.given and self.text is not None else None
        except ValueError:
            return None


UNSET: Final = Seen()


@dataclasses.dataclass(frozen=True)
class Dotted:
    """A dotted JSON flag: ``--kv-transfer-config.kv_role=kv_both``; ``text`` is its normalised single word."""

    option: str
    path: str
    value: str

    @property
    def text(self) -> str:
        """Return the flag as one word."""
        return f"{self.option}.{self.path}={self.value}"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What was read: watched options by canonical name, dotted flags, and what makes the reading unsafe.

    ``ends_options`` tells of a bare ``--``: nothing can be appended behind it.
    """

    options: dict[str, Seen]
    dotted: tuple[Dotted, ...] = ()
    ends_options: bool = False

    def get(self, option: str) -> Seen:
        """Return one watched option; UNSET when it is not there."""
        return self.options.get(option, UNSET)


def read(words: Sequence[str], *, serve: bool) -> Arguments:
    """Read vLLM's arguments, without the program and ``serve``.

    ``serve`` tells `vllm serve` from the module `vllm.entrypoints.openai.api_server`, which differ in one
    point: of several ``--model`` the first wins with the former, the last with the latter.
    """
    return _Reader(serve).run(words)


class _Reader:
    """State of one reading."""

    def __init__(self, serve: bool) -> None:
        self.serve = serve
        self.options: dict[str, Seen] = {}
        self.dotted: list[Dotted] = []
        self.positional: Seen | None = None

    def run(self, words: Sequence[str]) -> Arguments:
        place, ends = 0, False
        while place < len(words):
            word, start = words[place], place
            place += 1
            if word == "--":
                ends = True
                break
            if word.startswith(HOLE) and self.positional is not None:
                self._anything(f"a word that cannot be seen stands among the arguments (number {place})")
            elif _is_option(word):
                place = self._option(word, words, place)
            elif self.positional is None:
                self.positional = _value(word)
            if any(SPILL in word for word in words[start:place]):
                self._anything("a list or an unquoted variable that cannot be seen stands among the arguments")
        if any(word == "--config" or word.startswith("--config=") for word in words):
            # vLLM takes the file out before it parses: wherever the word stands, also as another option's value.
            self.options.setdefault("--config", Seen(present=True, unknown="a word --config stands there"))
        return Arguments(self._with_model(), tuple(self.dotted), ends)

    def _with_model(self) -> dict[str, Seen]:
        if self.positional is not None and "--model" not in self.options:
            return {**self.options, "--model": self.positional}
        return self.options

    def _anything(self, why: str) -> None:
        for option in WATCHED:
            self.options[option] = Seen(unknown=why, present=self.options.get(option, UNSET).present)

    def _option(self, word: str, words: Sequence[str], place: int) -> int:
        """Read the option ``word``; return the place behind its values."""
        if re.match(r"-O.", word):
            return place
        key, equals, inline = word.partition("=")
        if HOLE in key or SPILL in key:
            self._anything(f"the option {key.replace(HOLE, '...').replace(SPILL, '...')} cannot be seen completely")
            return place
        if key.startswith("--"):
            head, dot, tail = key.partition(".")
            key = head.replace("_", "-") + dot + tail
        if "." in key:
            return self._dotted(key, inline if equals else None, words, place)
        if word == "-O":
            return place + (place < len(words) and words[place] in ("0", "1", "2", "3"))
        found = _resolve(key)
        if len(found) != 1:
            return self._not_one(key, found, bool(equals), words, place)
        (spelling, glued) = found[0]
        option = vllm_flags.CANONICAL[spelling]
        arity = vllm_flags.ARITY[option]
        if arity == 0:
            self._record(option, spelling)
            return place
        if equals or glued:
            self._record(option, (inline if equals else glued) or "")
            return place
        return self._values(option, arity, words, place)

    def _values(self, option: str, arity: int | None, words: Sequence[str], place: int) -> int:
        if arity == 1:
            if place < len(words) and not _is_option(words[place]) and words[place] != "--":
                self._record(option, words[place])
                return place + 1
            self._unknown(option, f"{option} stands without a value")
            return place
        while place < len(words) and not _is_option(words[place]) and words[place] != "--":
            place += 1
        return place

    def _not_one(self, key: str, found: list[tuple[str, str]], inline: bool, words: Sequence[str], place: int) -> int:
        """An abbreviation of several options, or an option of another vLLM version."""
        for spelling, _ in found:
            option = vllm_flags.CANONICAL[spelling]
            self._unknown(option, f"{key} could mean several options")
        while not inline and place < len(words) and not _is_option(words[place]) and words[place] != "--":
            place += 1
        return place

    def _dotted(self, key: str, inline: str | None, words: Sequence[str], place: int) -> int:
        if inline is None:
            inline = words[place] if place < len(words) else ""
            place += 1
        head, _, path = key.partition(".")
        found = _resolve(head)
        option = vllm_flags.CANONICAL[found[0][0]] if len(found) == 1 else head
        self.dotted.append(Dotted(option, path, inline))
        return place

    def _record(self, option: str, text: str) -> None:
        if option not in WATCHED:
            return
        if option == "--model" and self.serve and self.options.get(option, UNSET).given:
            return
        self.options[option] = _value(text)

    def _unknown(self, option: str, why: str) -> None:
        if option in WATCHED:
            self.options[option] = Seen(unknown=why, present=True)


def option_of(word: str) -> str | None:
    """Return the option that ``word`` (without a value) spells in any way that vLLM takes; None for other words."""
    if not word.startswith("--") or "." in word or HOLE in word or SPILL in word:
        return None
    found = _resolve(word.replace("_", "-"))
    return vllm_flags.CANONICAL[found[0][0]] if len(found) == 1 else None


def _value(text: str) -> Seen:
    if HOLE in text or SPILL in text:
        why = "its value comes from a variable or a program that cannot be seen here"
        return Seen(unknown=why, present=True)
    return Seen(text, present=True)


def _is_option(word: str) -> bool:
    """Whether argparse takes ``word`` for an option rather than for a value.

    A blank makes a word a value, unless something that vLLM knows stands in front of it: `--kv-transfer={"a": 1}`.
    """
    if not word.startswith("-") or word in ("-", "--"):
        return False
    if re.fullmatch(r"-\d+|-\d*\.\d+", word):
        return False
    key = word.partition("=")[0]
    return " " not in word or "." in key or word.startswith("-O") or bool(_resolve(key.replace("_", "-")))


def _resolve(key: str) -> list[tuple[str, str]]:
    """Return the spellings that ``key`` can mean, each with a value glued to a one-letter option."""
    if key in vllm_flags.CANONICAL:
        return [(key, "")]
    if key.startswith("--"):
        return [(name, "") for name in vllm_flags.CANONICAL if name.startswith(key)]
    found = []
    for name in vllm_flags.CANONICAL:
        if name == key[:2]:
            found.append((name, key[2:]))
        elif name.startswith(key) and not name.startswith("--"):
            found.append((name, ""))
    return found
