"""A shell script's text, split into commands, words and the pieces of each word.

Why this exists: whether a dollar sign is an expansion depends on comments, quotes, escapes and here-documents, and on
nothing else. What the commands mean is not known here.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Literal

from kvshare_operator.core.commandline.words import HOLE, OURS

POSITIONAL: Final = "\3"
"""Inside text handed to eval: the place where further positional arguments would appear."""
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Quoting = Literal["none", "double"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a word. ``kind``: text, variable (its name in ``text``), positional (`@`, `*`, `1`...), unknown."""

    kind: Literal["text", "variable", "positional", "unknown"]
    text: str
    quoting: Quoting = "none"
    default: str | None = None
    """`${NAME:-default}`: used when the variable is not set; ``HOLE`` for one that is computed."""
    replaces_empty: bool = False
    """Whether the default is used for an empty value too: `${NAME:-x}` does, `${NAME-x}` does not."""
    assigns: bool = False
    """Whether the default stays the variable's value: `${NAME:=x}`."""


class Scanner:
    """Characters to commands of words of pieces."""

    def __init__(self, text: str, variable: str) -> None:
        self.text = text
        self.variable = variable
        self.place = 0
        self.commands: list[list[list[Piece]]] = []
        self.command: list[list[Piece]] = []
        self.word: list[Piece] | None = None
        self.redirect = False
        self.here: list[tuple[str, bool]] = []
        self.in_here_document = False
        self.defines_function = False

    def run(self) -> list[list[list[Piece]]]:
        """Return all simple commands in order; redirections and the text of here-documents are in none of them."""
        while self.place < len(self.text):
            self._step(self.text[self.place])
        self._end_command()
        return self.commands

    def _step(self, char: str) -> None:
        if char in " \t":
            self._end_word()
            self.place += 1
        elif char == "\n":
            self._end_command()
            self.place += 1
            self._here_documents()
        elif char == "\\":
            if self.text[self.place + 1 : self.place + 2] not in ("\n", ""):
                self._add(Piece("text", self.text[self.place + 1]))
            self.place += 2
        elif char == "#" and self.word is None:
            self._until_newline()
        elif char == "'":
            end = self.text.find("'", self.place + 1)
            end = len(self.text) if end < 0 else end
            self._add(Piece("text", self.text[self.place + 1 : end]))
            self.place = end + 1
        elif char == '"':
            self.place += 1
            self._double_quoted()
        elif char in "$`" + OURS + POSITIONAL:
            self._expansion("none")
        elif char in "<>" or self.text.startswith("&>", self.place):
            self._redirection()
        elif char in ";&|()":
            if char == "(" and self.word is not None and self.text[self.place + 1 :].lstrip(" \t").startswith(")"):
                self.defines_function = True
            self._end_command()
            self.place += 1
        else:
            self._add(Piece("text", char))
            self.place += 1

    def _add(self, piece: Piece) -> None:
        if self.word is None:
            self.word = []
        if piece.kind == "text" and self.word and self.word[-1].kind == "text":
            piece = Piece("text", self.word.pop().text + piece.text)
        self.word.append(piece)

    def _end_word(self) -> None:
        if self.word is not None and not self.redirect:
            self.command.append(self.word)
        if self.word is not None:
            self.redirect = False
        self.word = None

    def _end_command(self) -> None:
        self._end_word()
        self.redirect = False
        if self.command:
            self.commands.append(self.command)
        self.command = []

    def _until_newline(self) -> None:
        end = self.text.find("\n", self.place)
        self.place = len(self.text) if end < 0 else end

    def _double_quoted(self) -> None:
        self._add(Piece("text", ""))
        while self.place < len(self.text) and self.text[self.place] != '"':
            char = self.text[self.place]
            if char == "\\" and self.place + 1 < len(self.text):
                follow = self.text[self.place + 1]
                if follow != "\n":
                    self._add(Piece("text", follow if follow in '$`"\\' else char + follow))
                self.place += 2
            elif char in "$`" + OURS + POSITIONAL:
                self._expansion("double")
            else:
                self._add(Piece("text", char))
                self.place += 1
        self.place += 1

    def _expansion(self, quoting: Quoting) -> None:
        char, rest = self.text[self.place], self.text[self.place + 1 :]
        if char == OURS:
            self._take(1, Piece("variable", self.variable, quoting))
        elif char == POSITIONAL:
            self._take(1, Piece("positional", "*" if quoting == "double" else "@", quoting))
        elif char == "`":
            end = rest.find("`")
            self._take((len(rest) if end < 0 else end + 1) + 1, Piece("unknown", "", quoting))
        elif rest[:1] == "(":
            self._take(1 + _balanced(rest, "(", ")"), Piece("unknown", "", quoting))
        elif rest[:1] == "{":
            size = _balanced(rest, "{", "}")
            self._take(1 + size, _braced(rest[1 : size - 1], quoting))
        elif match := NAME.match(rest):
            self._take(1 + match.end(), Piece("variable", match[0], quoting))
        elif rest[:1] and rest[0] in "@*0123456789":
            self._take(2, Piece("positional", rest[0], quoting))
        elif rest[:1] and rest[0] in "#?$!-":
            self._take(2, Piece("unknown", rest[0], quoting))
        elif rest[:1] in ("'", '"') and quoting == "none":
            self.place += 1  # $'...' and $"...": read as the quoted string behind it
        else:
            self._take(1, Piece("text", "$"))

    def _take(self, size: int, piece: Piece) -> None:
        self.place += size
        self._add(piece)

    def _redirection(self) -> None:
        if self.word and len(self.word) == 1 and self.word[0].text.isdigit():
            self.word = None
        self._end_word()
        match = re.compile(r"&>>?|<<<|<<-?|<>|>>|>\||[<>]&?").match(self.text, self.place)
        assert match is not None
        self.place = match.end()
        if match[0] in ("<<", "<<-"):
            mark = re.compile(r"[ \t]*((?:'[^']*'|\"[^\"]*\"|\\.|[^\s;&|<>()])+)").match(self.text, self.place)
            if mark is not None:
                self.place = mark.end()
                plain = re.sub(r"['\"\\]", "", mark[1])
                self.here.append((plain, plain != mark[1]))
        else:
            self.redirect = True

    def _here_documents(self) -> None:
        for mark, quoted in self.here:
            while self.place < len(self.text):
                end = self.text.find("\n", self.place)
                end = len(self.text) if end < 0 else end
                line = self.text[self.place : end]
                self.place = end + 1
                if line.lstrip("\t") == mark:
                    break
                if not quoted and re.search(rf"\$\{{?{self.variable}\b", line):
                    self.in_here_document = True
        self.here.clear()


def _balanced(text: str, opening: str, closing: str) -> int:
    """Return the length of the bracketed text at the start of ``text``, quotes respected."""
    depth, place, quote = 0, 0, ""
    while place < len(text):
        char = text[place]
        if quote:
            quote = "" if char == quote else quote
        elif char == "\\":
            place += 1
        elif char in "'\"":
            quote = char
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return len(text)


def _braced(inside: str, quoting: Quoting) -> Piece:
    """Read what stands between the braces of `${...}`."""
    if inside in ("@", "*") or inside.isdigit():
        return Piece("positional", inside, quoting)
    match = NAME.match(inside)
    if match is None:
        return Piece("unknown", inside, quoting)
    rest = inside[match.end() :]
    if not rest:
        return Piece("variable", match[0], quoting)
    default = re.fullmatch(r"(:?)[-=](.*)", rest, re.DOTALL)
    if default is not None:
        text = HOLE if re.search(r"[$`'\"\\]", default[2]) else default[2]
        return Piece("variable", match[0], quoting, text, bool(default[1]), rest[0] == "=" or rest[:2] == ":=")
    if re.match(r":?\?", rest):
        return Piece("variable", match[0], quoting)
    return Piece("unknown", inside, quoting)
