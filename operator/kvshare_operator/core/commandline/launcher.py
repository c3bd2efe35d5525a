"""What program a command line ends up starting, behind tini, env, python -m and their like.

Why this exists: `tini -- vllm serve` runs vLLM and `tini -- bash -c ...` runs a shell; a prefix that is not
known could do anything with further arguments. A table of prefixes, each with the options that take a value.
Knows words only; what a shell script does is the business of ``shell``.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Sequence
from typing import Final, Literal

from kvshare_operator.core.commandline.words import HOLE, OURS, SPILL

Kind = Literal["serve", "module", "shell", "shell-file", "shell-other", "ray", "engine", "unknown", "nothing"]


@dataclasses.dataclass(frozen=True)
class Program:
    """The program behind all prefixes.

    ``rest`` are its arguments: vLLM's own for serve and module; for a shell `(script, $0, $1, ...)`.
    ``name`` is what a message calls it. ``environment`` are the variables that `env` in front of it sets, None for
    one that it removes.
    """

    kind: Kind
    name: str
    rest: tuple[str, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()


_PREFIXES: Final[dict[str, str]] = {
    "tini": "p e",
    "tini-static": "p e",
    "dumb-init": "r",
    "catatonit": "",
    "env": "u C",
    "nohup": "",
    "exec": "a",
    "command": "",
    "nice": "n",
    "ionice": "c n p",
    "numactl": "i m N C l p",
    "stdbuf": "i o e",
    "setsid": "",
    "time": "f o",
    "opentelemetry-instrument": "",
    "ddtrace-run": "",
    "gosu": "",
    "su-exec": "",
    "taskset": "",
    "chrt": "T P D",
    "timeout": "k s",
}
"""Prefix programs -> one-letter options that take the next word as value; long options use ``=``."""

_OPERANDS: Final = frozenset({"gosu", "su-exec", "taskset", "chrt", "timeout"})
"""Prefix programs with one word of their own (a user, a mask, a time) in front of the program."""

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "busybox"})
_OTHER_SHELLS: Final = frozenset({"zsh", "fish", "csh", "tcsh"})
"""Shells that split variables into words by other rules, or not at all."""
_ENGINES: Final = {
    "sglang": "SGLang",
    "text-generation-launcher": "Text Generation Inference",
    "trtllm-serve": "TensorRT-LLM",
    "tritonserver": "Triton Inference Server",
    "lmdeploy": "LMDeploy",
    "llama-server": "llama.cpp",
    "ollama": "Ollama",
}
_MODULES: Final = {
    "vllm.entrypoints.openai.api_server": "module",
    "vllm.entrypoints.cli.main": "cli",
    "vllm": "cli",
}
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def find_program(words: Sequence[str]) -> Program:
    """Strip launcher prefixes from a command line and name the program behind them."""
    environment: list[tuple[str, str | None]] = []
    return dataclasses.replace(_found(list(words), environment), environment=tuple(environment))


def _found(rest: list[str], environment: list[tuple[str, str | None]]) -> Program:
    """Find the program; note in ``environment`` what `env` does in front of it."""
    while rest:
        if any(mark in rest[0] for mark in (HOLE, SPILL, OURS)):
            return Program("unknown", "a program that cannot be seen here", tuple(rest))
        name = posixpath.basename(rest[0])
        if name in _PREFIXES:
            rest = _behind_prefix(name, rest[1:], environment)
            continue
        if name in _SHELLS:
            return _shell(rest[1:])
        if name in _OTHER_SHELLS:
            return Program("shell-other", name, tuple(rest[1:]))
        if re.fullmatch(r"python(3(\.\d+)?)?", name):
            return _python(rest[1:])
        return _named(name, rest[1:])
    return Program("nothing", "nothing")


def _named(name: str, rest: Sequence[str]) -> Program:
    if name == "vllm":
        return _cli(rest)
    if name == "ray":
        return Program("ray" if rest[:1] == ["start"] else "unknown", " ".join(("ray", *rest[:1])), tuple(rest))
    if name in _ENGINES:
        return Program("engine", _ENGINES[name], tuple(rest))
    return Program("unknown", name, tuple(rest))


def _cli(rest: Sequence[str]) -> Program:
    if rest[:1] == ["serve"]:
        return Program("serve", "vllm serve", tuple(rest[1:]))
    return Program("unknown", f"vllm {rest[0]}" if rest else "vllm without a sub-command", tuple(rest))


def _behind_prefix(name: str, rest: list[str], environment: list[tuple[str, str | None]]) -> list[str]:
    with_value = _PREFIXES[name].split()
    while rest:
        word = rest[0]
        if word == "--":
            return rest[2:] if name in _OPERANDS else rest[1:]
        if name == "env" and (word == "-" or re.match(r"-[v0]*[iS]|--ignore-env|--split-string", word)):
            return [f"env {word}"]  # takes our environment away, or hides a command line
        if name == "env" and (removed := re.match(r"(?:-[v0]*u|--unset=)(.*)", word)):
            environment.append((removed[1] or next(iter(rest[1:]), ""), None))
        if word.startswith("--"):
            rest = rest[1:]
        elif word.startswith("-") and len(word) > 1:
            rest = rest[2:] if len(word) == 2 and word[1] in with_value else rest[1:]
        elif name == "env" and _ASSIGNMENT.match(word):
            variable, _, value = word.partition("=")
            environment.append((variable, value))
            rest = rest[1:]
        else:
            break
    return rest[1:] if name in _OPERANDS else rest


def _python(rest: Sequence[str]) -> Program:
    place = 0
    while place < len(rest) and rest[place].startswith("-"):
        word = rest[place]
        if word == "-m" or (word.startswith("-m") and len(word) > 2):
            module = word[2:] or (rest[place + 1] if place + 1 < len(rest) else "")
            behind = list(rest[place + (1 if word[2:] else 2) :])
            found = _MODULES.get(module)
            if found == "module":
                return Program("module", module, tuple(behind))
            if found == "cli":
                return _cli(behind)
            engine = _ENGINES.get(module.partition(".")[0])
            return Program("engine" if engine else "unknown", engine or f"python -m {module}", tuple(behind))
        if word == "-c" or (not word.startswith("--") and set(word) & set("IE")):
            # -I and -E ignore PYTHONPATH, so the connector could not be found
            return Program("unknown", f"python {word}", tuple(rest))
        place += 2 if word in ("-X", "-W") else 1
    if place < len(rest):
        name = posixpath.basename(rest[place])
        if name == "vllm":
            return _cli(rest[place + 1 :])
        return Program("unknown", f"python {rest[place]}", tuple(rest[place + 1 :]))
    return Program("unknown", "python", ())


def _shell(rest: Sequence[str]) -> Program:
    place = 0
    while place < len(rest) and rest[place][:1] in ("-", "+") and rest[place] not in ("-", "--"):
        word = rest[place]
        place += 1
        if not word.startswith("--") and "c" in word[1:] and word.startswith("-"):
            if word.endswith("o"):
                place += 1
            while place < len(rest) and rest[place][:1] in ("-", "+") and rest[place] != "--":
                place += 2 if rest[place] in ("-o", "-O", "+o", "+O") else 1
            if rest[place : place + 1] == ["--"]:
                place += 1
            return Program("shell", "a shell script", tuple(rest[place:]))
        if word in ("-o", "-O", "+o", "+O") or (not word.startswith("--") and word.endswith("o")):
            place += 1
    if place < len(rest) and rest[place] not in ("-", "--"):
        return Program("shell-file", rest[place], tuple(rest[place:]))
    return Program("unknown", "a shell that reads its commands from elsewhere", ())
