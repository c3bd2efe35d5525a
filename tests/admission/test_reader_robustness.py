"""The command-line reader on arbitrary text: it always ends, never raises, and never invents a size."""

from __future__ import annotations

import shlex
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_operator.core.commandline import flags, launcher, shell
from kvshare_operator.core.commandline.reading import Opening, Reading, read_container
from kvshare_operator.core.commandline.words import Environment, environment, expand

PIECES = [*"ab -=\n\t'\"\\$`{}()<>&|;#@*!_0:.~", "vllm serve ", "eval ", "$KVSHARE_VLLM_ARGS", "<<E\n"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
WORDS = st.lists(st.text(st.sampled_from("-=tp.0a_ $()"), max_size=8), max_size=8)
NOTHING = Environment({})


@given(TEXT, WORDS)
def test_any_script_is_split_without_an_exception(text: str, words: list[str]) -> None:
    """Unbalanced quotes, half expansions, strange redirections."""
    script = shell.read_script(text, words, NOTHING, "KVSHARE_VLLM_ARGS")
    for command in script.commands:
        launcher.find_program(command.words)


@given(WORDS)
def test_any_words_are_read_without_an_exception(words: list[str]) -> None:
    """Launchers, options, values."""
    launcher.find_program(words)
    found = flags.read(words, serve=True)
    assert set(found.options) <= set(flags.WATCHED)


@given(TEXT, WORDS)
def test_any_container_is_read_or_refused(text: str, words: list[str]) -> None:
    """Nothing else comes out."""
    for container in ({"name": "c", "command": ["bash", "-c", text], "args": words}, {"name": "c", "command": words}):
        answer = read_container(container, Opening())
        assert isinstance(answer, Reading) or answer.code


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=6), min_size=1, max_size=6))
def test_quoted_words_come_out_of_a_script_as_they_went_in(words: list[str]) -> None:
    """For text without expansions the splitter agrees with the standard library's quoting."""
    line = " ".join(shlex.quote(word) for word in ["prog", *words])
    (command,) = shell.read_script(line, (), NOTHING, "X").commands
    assert command.words == ("prog", *words)


@given(TEXT)
def test_kubernetes_expansion_ends_and_keeps_text_without_references(text: str) -> None:
    """`$$` is a dollar, `$(NAME)` a value, everything else stays."""
    assert expand(text, NOTHING).replace("$", "") == text.replace("$", "")


def test_environment_of_odd_entries_is_read_as_far_as_it_goes() -> None:
    """The API server validates after us."""
    found = environment({"env": [{"name": "A", "value": "1"}, {"name": 3}, "x", {"name": "B"}], "envFrom": []})
    assert found.values == {"A": "1", "B": ""}


GROWS: dict[str, dict[str, Any]] = {
    "variables of variables": {
        "env": [{"name": f"V{n}", "value": f"$(V{n - 1})" * 10 if n else "x" * 10} for n in range(30)],
        "command": ["vllm", "serve", "org/m", "$(V29)"],
    },
    "a reference many times": {
        "env": [{"name": "A", "value": "x" * 60_000}],
        "command": ["vllm", "serve", "org/m", "$(A)" * 100_000],
    },
    "words of a script many times": {"command": ["bash", "-c", "vllm serve $@ " * 4000, "x", *["w" * 100] * 4000]},
    "eval of eval": {
        "command": ["bash", "-c", 'eval eval eval "$@ $@ $@ $@"', "x", *["$@ $@ $@"] * 1000, "vllm serve org/m"]
    },
    "a variable of a script many times": {
        "env": [{"name": "A", "value": "y" * 60_000}],
        "command": ["bash", "-c", "vllm serve $A " * 4000],
    },
    "a very long script": {"command": ["bash", "-c", "vllm serve org/m $A" + " $a" * 400_000]},
    "very many words": {"command": ["vllm", "serve", "org/m"], "args": ["--tensor"] * 300_000},
    "one very long word": {"command": ["vllm", "serve", "x" * 1_000_000]},
    "an open bracket": {"command": ["bash", "-c", "vllm serve " + "$(" * 30_000]},
    "many quotes": {"command": ["bash", "-c", "vllm serve " + "'\"" * 30_000]},
}


@pytest.mark.parametrize("fields", GROWS.values(), ids=GROWS.keys())
def test_text_that_grows_without_end_is_read_within_a_second_or_two(fields: dict[str, Any]) -> None:
    """A pod must not be able to keep the webhook busy for others: bounded time, bounded memory."""
    began = time.thread_time()
    answer = read_container({"name": "c", **fields}, Opening())
    assert isinstance(answer, Reading) or answer.code
    assert time.thread_time() - began < 2
