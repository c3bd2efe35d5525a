"""Shell scripts, as far as admission must understand them.

Why this exists: flags reach vLLM inside a script only where the script's author expands something of ours:
`$KVSHARE_VLLM_ARGS` unquoted, or the positional `$@`. Whether a dollar sign is such an expansion depends on
comments, quotes, escapes, here-documents and `eval`. This module says what the commands of a script do to
variables and to `$@`, and keeps, for each, its words and those expansions. It runs nothing and guesses nothing:
what a program prints or a variable holds is ``HOLE`` (one word) or ``SPILL`` (any number of words).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Final

from kvshare_operator.core.commandline.shell_expansion import Budget, Expansion, Positional, Reference, TooLongError
from kvshare_operator.core.commandline.shell_text import NAME, Piece, Scanner
from kvshare_operator.core.commandline.words import HOLE, MOST_CHARACTERS, Environment

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


def read_script(text: str, positional: Sequence[str], env: Environment, variable: str) -> Script:
    """Split a script into commands. ``positional`` are `$1...`; ``variable`` is the name that is ours.

    Raises TooLongError.
    """
    return _read(text, tuple(positional), env, variable, 0, Budget())


def _read(
    text: str, positional: tuple[str, ...], env: Environment, variable: str, depth: int, budget: Budget
) -> Script:
    if len(text) > MOST_CHARACTERS:
        raise TooLongError
    scanner = Scanner(text, variable)
    raw = scanner.run()
    assigned = _assigned(raw) | _filled(raw, env)
    known = env.without({*assigned, *env.values} if any(map(_assigns_anything, raw)) else assigned)
    commands: list[Command] = []
    environment: list[tuple[str, str | None]] = []
    sets_ours = variable in assigned
    moves = scanner.defines_function or any(_moves_positional(words, len(positional)) for words in raw)
    for words in raw:
        expansion = Expansion(positional, known, variable, budget)
        expanded = _strip_reserved(expansion.words(words))
        if expanded and expanded[0] == "eval" and depth < _MAX_EVAL_DEPTH:
            inner = Expansion(positional, known, variable, budget).source(words[_skip(words, "eval") :])
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
            names |= _assigned(Scanner(inner.partition("eval ")[2], "").run(), depth + 1)
        for text in texts:
            if match := _ASSIGNMENT.match(text):
                names.add(match[1])
            elif declares and NAME.fullmatch(text):
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
