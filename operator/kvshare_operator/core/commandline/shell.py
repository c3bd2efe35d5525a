"""Shell scripts, as far as admission must understand them.

Why this exists: flags reach vLLM inside a script only where the script's author expands something of ours:
`$KVSHARE_VLLM_ARGS` unquoted, or the positional `$@`. Whether a dollar sign is such an expansion depends on
comments, quotes, escapes, here-documents and `eval`. This module splits a script into simple commands and
keeps, for each, its words and those expansions. It runs nothing and guesses nothing: what a program prints
or a variable holds is ``HOLE`` (one word) or ``SPILL`` (any number of words).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from kvshare_operator.core.commandline.words import HOLE, MOST_CHARACTERS, OURS, SPILL, Environment

_POSITIONAL: Final = "\3"
"""Inside text handed to eval: the place where further positional arguments would appear."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=")
_COMPUTED: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:[-+*/%^]?=|\+\+|--)|(?:\+\+|--)([A-Za-z_][A-Za-z0-9_]*)")
"""An assignment in arithmetic: `TP*=2`, `TP++`, `--TP`."""
_RESERVED: Final = frozenset({"if", "then", "elif", "else", "do", "while", "until", "!", "{", "}", "time", "fi"})
_DECLARES: Final = frozenset(
    {
        "export", "local", "declare", "typeset", "readonly", "read", "for", "unset", "getopts", "mapfile", "readarray",
    }
)  # fmt: skip
_ASSIGNS: Final = frozenset({"export", "local", "declare", "typeset", "readonly"})
"""Built-ins whose arguments are assignments that last."""
_MAX_EVAL_DEPTH: Final = 3

Quoting = Literal["none", "double"]
Positional = Literal["split", "bare", "joined"]
"""How `$@` stands: quoted, which keeps every word; unquoted, which IFS splits once more; as one word of all."""
Reference = Literal["none", "double", "glued"]
"""How our variable stands: as a word of its own, in double quotes, or glued to other text of the same word."""


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


@dataclasses.dataclass(frozen=True)
class Command:
    """One simple command after expansion; ``words`` keeps the place of our variable as the word ``OURS``.

    ``ours`` tells of every expansion of our variable in it, ``positional`` of every `$@` (``joined`` for a
    quoted `$*`, which makes one word of all, and for `$@` glued to other text). ``environment`` are the variables
    that it sets for itself (`A=b program`, `env A=b program`), as `(name, text)`.
    """

    words: tuple[str, ...]
    ours: tuple[Reference, ...] = ()
    positional: tuple[Positional, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()


@dataclasses.dataclass(frozen=True)
class Script:
    """All simple commands of a script, in order.

    Attributes:
        in_here_document: our variable stands in the text of a here-document.
        sets_ours: the script sets or unsets our variable itself.
        moves_positional: `$@` is not what the container passes (shift, set, a function's own arguments), or
            further arguments would change what the script does (`$#`, a `$1` that is not given).
        environment: the variables that it sets for what follows, as `(name, text)`, None for one that it unsets.
        needs_ours: it stops at variables that are not set (`set -u`), and ours has no default in it.
    """

    commands: tuple[Command, ...]
    in_here_document: bool = False
    sets_ours: bool = False
    moves_positional: bool = False
    environment: tuple[tuple[str, str | None], ...] = ()
    needs_ours: bool = False


class TooLongError(ValueError):
    """A script, or what its expansions grow to, is longer than anybody writes."""


class _Budget:
    """How many characters may still be produced; a short script can grow without end."""

    def __init__(self) -> None:
        self.left = 16 * MOST_CHARACTERS

    def spend(self, characters: int) -> None:
        self.left -= characters
        if self.left < 0:
            raise TooLongError


def read_script(text: str, positional: Sequence[str], env: Environment, variable: str) -> Script:
    """Split a script into commands. ``positional`` are `$1...`; ``variable`` is the name that is ours.

    Raises TooLongError.
    """
    return _read(text, tuple(positional), env, variable, 0, _Budget())


def _read(
    text: str, positional: tuple[str, ...], env: Environment, variable: str, depth: int, budget: _Budget
) -> Script:
    if len(text) > MOST_CHARACTERS:
        raise TooLongError
    scanner = _Scanner(text, variable)
    raw = scanner.run()
    assigned = _assigned(raw) | _filled(raw, env)
    known = env.without({*assigned, *env.values} if any(map(_assigns_anything, raw)) else assigned)
    commands: list[Command] = []
    environment: list[tuple[str, str | None]] = []
    sets_ours = variable in assigned
    moves = scanner.defines_function or any(_moves_positional(words, len(positional)) for words in raw)
    for words in raw:
        expansion = _Expansion(positional, known, variable, budget)
        expanded = _strip_reserved(expansion.words(words))
        if expanded and expanded[0] == "eval" and depth < _MAX_EVAL_DEPTH:
            inner = _Expansion(positional, known, variable, budget).source(words[_skip(words, "eval") :])
            evaluated = _read(inner, positional, known, variable, depth + 1, budget)
            commands.extend(evaluated.commands)
            environment.extend(evaluated.environment)
            sets_ours = sets_ours or evaluated.sets_ours
            moves = moves or evaluated.moves_positional
        elif expanded:
            own = () if expanded[0] in _ASSIGNS else tuple(_written(words))
            commands.append(Command(expanded, tuple(expansion.ours), tuple(expansion.positional_seen), own))
        if not expanded or expanded[0] in _ASSIGNS:
            environment.extend(_written(words))
        if expanded and expanded[0] == "unset":
            environment.extend((name, None) for name in expanded[1:])
    bare = any(piece.text == variable and piece.default is None for piece in _variables(raw))
    needs = bare and any(map(_stops_at_unset, raw))
    return Script(tuple(commands), scanner.in_here_document, sets_ours, moves, tuple(environment), needs)


def _written(words: Sequence[Sequence[Piece]]) -> Iterator[tuple[str, str]]:
    """Return what assignments among the words of a command assign, with `${NAME}` for what refers to a variable.

    `A+=b` is read as `A=${A}b`: what was there stays.
    """
    for word in words:
        text = "".join(piece.text if piece.kind == "text" else f"${{{piece.text}}}" for piece in word)
        if match := _ASSIGNMENT.match(text):
            before = f"${{{match[1]}}}" if match[0].endswith("+=") else ""
            yield match[1], before + text[match.end() :]


def _skip(words: Sequence[Sequence[Piece]], name: str) -> int:
    for number, word in enumerate(words):
        if len(word) == 1 and word[0].text == name:
            return number + 1
    return len(words)


def _moves_positional(words: Sequence[Sequence[Piece]], given: int) -> bool:
    """Whether a command changes `$@`, or reads an argument (or their number) that only ours would add."""
    pieces = [piece for word in words for piece in word]
    if any(_reads_later(piece, given) for piece in pieces):
        return True
    texts = [word[0].text if len(word) == 1 else "" for word in words]
    start = next((number for number, text in enumerate(texts) if text not in _RESERVED), len(texts))
    if texts[start : start + 1] in (["for"], ["select"], ["getopts"]):
        unsaid = len(texts) - start == (3 if texts[start] == "getopts" else 2)
        return unsaid or any(one.kind == "positional" and one.text in "@*" for one in pieces)
    for number, text in enumerate(texts):
        if text in ("shift", "function"):
            return True
        if text == "set":
            return _sets_positional(texts[number + 1 :])
    return False


def _reads_later(piece: Piece, given: int) -> bool:
    """Whether an expansion is another once there are more than ``given`` arguments: `$3`, `${1:-x}`, `$#`, `${@:2}`."""
    number = re.match(r"\d+", piece.text) if piece.kind in ("positional", "unknown") else None
    if number is not None:
        return int(number[0]) > given
    return piece.kind == "unknown" and re.match(r"#$|#?[@*]", piece.text) is not None


def _sets_positional(words: Sequence[str]) -> bool:
    """Whether the arguments of `set` contain more than options: `set -euo pipefail` does not."""
    words = list(words)
    while words and words[0][:1] in ("-", "+") and words[0] not in ("-", "--"):
        words = words[2:] if words[0].endswith("o") else words[1:]
    return bool(words)


def _stops_at_unset(words: Sequence[Sequence[Piece]]) -> bool:
    """Whether a command is `set -u`, `set -euo pipefail` or `set -o nounset`."""
    texts = [word[0].text if len(word) == 1 else "" for word in words]
    if texts[:1] != ["set"]:
        return False
    return "nounset" in texts or any(re.fullmatch(r"-[A-Za-z]*u[A-Za-z]*", text) for text in texts)


def _strip_reserved(words: tuple[str, ...]) -> tuple[str, ...]:
    start = 0
    while start < len(words) and (words[start] in _RESERVED or _ASSIGNMENT.match(words[start])):
        start += 1
    return words[start:]


def _assigned(commands: Sequence[Sequence[Sequence[Piece]]], depth: int = 0) -> set[str]:
    """Names that the script itself sets: what the container's environment says about them does not hold."""
    names: set[str] = set()
    for words in commands:
        declares = False
        texts = [word[0].text if word and word[0].kind == "text" else "" for word in words]
        if "eval" in texts and depth < _MAX_EVAL_DEPTH:
            inner = " ".join("".join(p.text if p.kind == "text" else HOLE for p in word) for word in words)
            names |= _assigned(_Scanner(inner.partition("eval ")[2], "").run(), depth + 1)
        for text in texts:
            if match := _ASSIGNMENT.match(text):
                names.add(match[1])
            elif declares and _NAME.fullmatch(text):
                names.add(text)
            declares = declares or text in _DECLARES
        if texts[:2] == ["printf", "-v"]:
            names.update(texts[2:3])
        computed = texts[1:] if texts[:1] == ["let"] else ["".join(texts[:2])]
        names.update(match[1] or match[2] for text in computed if (match := _COMPUTED.match(text)))
    return names


def _variables(commands: Sequence[Sequence[Sequence[Piece]]]) -> Iterator[Piece]:
    """Return the variables that some commands read."""
    return (piece for words in commands for word in words for piece in word if piece.kind == "variable")


def _filled(commands: Sequence[Sequence[Sequence[Piece]]], env: Environment) -> set[str]:
    """Names that `${NAME:=default}` sets, because the container gives them an empty value."""
    return {piece.text for piece in _variables(commands) if piece.assigns and env.values.get(piece.text) == ""}


def _assigns_anything(words: Sequence[Sequence[Piece]]) -> bool:
    """Whether a command sets names that cannot be seen: `export $(cat file)`, `export "$line"`, `. file`, `eval $(x)`.

    A virtual environment's `activate` is known to leave an engine's variables alone.
    """
    texts = [word[0].text if len(word) == 1 and word[0].kind == "text" else "" for word in words]
    start = next((number for number, text in enumerate(texts) if text not in _RESERVED), len(texts))
    name, rest = "".join(texts[start : start + 1]), words[start + 1 :]
    if name in ("source", "."):
        return not any(word[-1].text.rpartition("/")[2] == "activate" for word in rest[:1])
    if name == "eval":
        return any(
            [piece.kind for piece in word if piece.text or piece.kind != "text"][:1] == ["unknown"] for word in rest[:1]
        )
    return name in _ASSIGNS and any(_names_unseen(word) for word in rest)


def _names_unseen(word: Sequence[Piece]) -> bool:
    """Whether what stands in front of a word's first `=` is not all text."""
    before = itertools.takewhile(lambda piece: not (piece.kind == "text" and "=" in piece.text), word)
    return any(piece.kind != "text" for piece in before)


@dataclasses.dataclass
class _Expansion:
    """Expands the words of one command and notes what is ours."""

    given: tuple[str, ...]
    env: Environment
    variable: str
    budget: _Budget
    ours: list[Reference] = dataclasses.field(default_factory=list)
    positional_seen: list[Positional] = dataclasses.field(default_factory=list)

    def words(self, raw: Sequence[Sequence[Piece]]) -> tuple[str, ...]:
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
            return " ".join((*self.given, _POSITIONAL))
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


class _Scanner:
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
        elif char in "$`" + OURS + _POSITIONAL:
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
            elif char in "$`" + OURS + _POSITIONAL:
                self._expansion("double")
            else:
                self._add(Piece("text", char))
                self.place += 1
        self.place += 1

    def _expansion(self, quoting: Quoting) -> None:
        char, rest = self.text[self.place], self.text[self.place + 1 :]
        if char == OURS:
            self._take(1, Piece("variable", self.variable, quoting))
        elif char == _POSITIONAL:
            self._take(1, Piece("positional", "*" if quoting == "double" else "@", quoting))
        elif char == "`":
            end = rest.find("`")
            self._take((len(rest) if end < 0 else end + 1) + 1, Piece("unknown", "", quoting))
        elif rest[:1] == "(":
            self._take(1 + _balanced(rest, "(", ")"), Piece("unknown", "", quoting))
        elif rest[:1] == "{":
            size = _balanced(rest, "{", "}")
            self._take(1 + size, _braced(rest[1 : size - 1], quoting))
        elif match := _NAME.match(rest):
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
    match = _NAME.match(inside)
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
