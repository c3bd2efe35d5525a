"""What every command owes its user: help with examples, exit codes in the help, completion, plain text in a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from kvshare_operator.cli.main import app

COMMANDS = ("plan", "inject", "check", "must-gather", "purge")


def help_of(command: str) -> str:
    """The help text without frames."""
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    return str(result.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_says_how_every_option_is_used(command: str) -> None:
    """5.7: examples that begin with the command itself; no option without a sentence."""
    text = help_of(command)
    assert "Examples:" in text
    assert f"kvshare {command}" in text.partition("Examples:")[2]
    click_command: Any = typer.main.get_command(app)
    for option in click_command.commands[command].params:
        assert option.help or option.metavar or option.name == "help", option.name


@pytest.mark.parametrize("command", ["plan", "inject", "check", "purge"])
def test_help_names_the_exit_codes(command: str) -> None:
    """5.7: 0 good, 1 refused or inconsistent, 2 usage; 3 where a cluster is asked."""
    words = " ".join(help_of(command).split())
    assert "Exit code 0" in words
    assert "2: wrong usage" in words
    assert ("3: no cluster answers" in words) == (command in ("check", "purge"))


def test_the_version_is_the_packages_own() -> None:
    """One word and one number, for scripts and for questions to a maintainer."""
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"kvshare {metadata.version('kvshare')}\n")


@pytest.mark.parametrize("words", [["plan", "--no-such"], ["nothing"], ["inject"], ["check", "extra"], []])
def test_wrong_usage_is_exit_code_2_on_standard_error(words: list[str]) -> None:
    """Standard output stays empty, so a pipe gets nothing; without any word the help is shown."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert (result.stdout == "") == bool(words)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    """The library's own completion, as the installed script calls it."""
    code = "from kvshare_operator.cli.main import main; import sys; sys.argv[0] = 'kvshare'; main()"

    def complete(line: str) -> str:
        environment = {
            **os.environ,
            "_KVSHARE_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        }
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        return ran.stdout

    assert "inject" in complete("kvshare in")
    assert "--prefill" in complete("kvshare plan --pre")


def test_piped_output_has_no_colours_or_cursor_movements() -> None:
    """5.7: plain when piped, whatever the terminal of the caller can do."""
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("FORCE_COLOR", None)
    code = "from kvshare_operator.cli.main import main; main()"
    words = ["plan", "--kv-heads", "8", "--prefill", "4,2", "--decode", "2", "--layers", "4", "--pp", "1,2"]
    ran = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, check=False)
    assert ran.returncode == 0
    assert b"\x1b" not in ran.stdout + ran.stderr
