"""The words of one command after the shell's expansions, as far as they can be known.

Why this exists: variables and positional parameters become text, several words, or a hole; and the places where ours
would be expanded are noted on the way. Growth is bounded: a short script can grow without end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from kvshare_operator.core.commandline.shell_text import POSITIONAL, Piece
from kvshare_operator.core.commandline.words import HOLE, MOST_CHARACTERS, OURS, SPILL, Environment

Positional = Literal["split", "bare", "joined"]
"""How `$@` stands: quoted, which keeps every word; unquoted, which IFS splits once more; as one word of all."""
Reference = Literal["none", "double", "glued"]
"""How our variable stands: as a word of its own, in double quotes, or glued to other text of the same word."""


class TooLongError(ValueError):
    """A script, or what its expansions grow to, is longer than anybody writes."""


class Budget:
    """How many characters may still be produced; a short script can grow without end."""

    def __init__(self) -> None:
        self.left = 16 * MOST_CHARACTERS

    def spend(self, characters: int) -> None:
        """Take what is about to be produced; raises TooLongError when that is too much."""
        self.left -= characters
        if self.left < 0:
            raise TooLongError


@dataclasses.dataclass
class Expansion:
    """Expands the words of one command and notes what is ours."""

    given: tuple[str, ...]
    env: Environment
    variable: str
    budget: Budget
    ours: list[Reference] = dataclasses.field(default_factory=list)
    positional_seen: list[Positional] = dataclasses.field(default_factory=list)

    def words(self, raw: Sequence[Sequence[Piece]]) -> tuple[str, ...]:
        """Return the command's words; a word of the script may become none or several."""
        out: list[str] = []
        for word in raw:
            out.extend(self._word(word))
        return tuple(out)

    def source(self, raw: Sequence[Sequence[Piece]]) -> str:
        """Return the text that eval would read again."""
        return " ".join("".join(self._again(piece) for piece in word) for word in raw)

    def _again(self, piece: Piece) -> str:
        if piece.kind == "text":
            return piece.text
        if piece.kind == "variable" and piece.text == self.variable:
            return OURS
        if piece.kind == "positional" and piece.text in "@*":
            self.budget.spend(sum(len(word) + 1 for word in self.given))
            return " ".join((*self.given, POSITIONAL))
        value = self._value(piece)
        self.budget.spend(len(value or ""))
        return SPILL if value is None else value

    def _value(self, piece: Piece) -> str | None:
        if piece.kind == "variable":
            if piece.text in self.env.values:
                value = self.env.values[piece.text]
                value = piece.default if value == "" and piece.replaces_empty else value
            else:
                value = None if self.env.open else piece.default
            return None if value == HOLE else value
        if piece.kind == "positional" and piece.text.isdigit() and 0 < int(piece.text) <= len(self.given):
            return self.given[int(piece.text) - 1]
        return None

    def _word(self, pieces: Sequence[Piece]) -> list[str]:
        fields: list[str] = []
        current: str | None = None
        for piece in pieces:
            if piece.kind == "text":
                current = (current or "") + piece.text
                continue
            if piece.kind == "variable" and piece.text == self.variable:
                self.ours.append("glued" if piece.quoting == "none" and len(pieces) > 1 else piece.quoting)
                current = (current or "") + OURS
                continue
            if piece.kind == "positional" and piece.text in "@*":
                joined = piece.text == "*" and piece.quoting == "double"
                alone = all(one is piece or (one.kind == "text" and not one.text) for one in pieces)
                split: Positional = "split" if piece.quoting == "double" else "bare"
                self.positional_seen.append(split if alone and not joined else "joined")
                self.budget.spend(sum(len(word) + 1 for word in self.given))
                parts = [" ".join(self.given)] if joined and self.given else list(self.given)
            else:
                value = self._value(piece)
                self.budget.spend(len(value or ""))
                if value is None:
                    parts = [HOLE if piece.quoting == "double" and not _many(piece) else SPILL]
                elif piece.quoting == "double":
                    current = (current or "") + value
                    continue
                else:
                    parts = value.split()
            for number, part in enumerate(parts):
                if number == 0:
                    current = (current or "") + part
                else:
                    fields.append(current or "")
                    current = part
        if current is not None:
            fields.append(current)
        return fields


def _many(piece: Piece) -> bool:
    """Whether a piece makes several words even in double quotes: `${LIST[@]}`, `${@:2}`."""
    return piece.kind == "unknown" and (piece.text.startswith("@") or "[@]" in piece.text)
