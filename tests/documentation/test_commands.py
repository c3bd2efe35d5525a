"""Every command in README and docs is one that the programs take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest
import typer.main

import pages
from kvshare_operator.cli.main import app
from pages import PAGES, ROOT, Command, of
from testbed.prepare.go_programs import program

VERBS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("command", of("kvshare"))
def test_kvshare_takes_the_arguments(command: Command) -> None:
    """Known subcommand, known options, values of the right form; nothing is read or asked yet."""
    words = list(command.words[1:])
    group = typer.main.get_command(app)
    if words[0].startswith("--"):
        assert words[0] in ("--help", "--install-completion", "--show-completion")
        return
    found = getattr(group, "commands").get(words[0])  # noqa: B009 - the group's type is typer's own
    assert found is not None, f"{command.place}: there is no command {words[0]}"
    try:
        found.make_context(words[0], words[1:])
    except click.ClickException as error:
        pytest.fail(f"{command.place}: {' '.join(command.words)}: {error}")


@pytest.mark.parametrize("command", [one for one in of("kvshare") if "--kv-heads" in one.values[0].words])
def test_kvshare_plan_without_a_file_works(command: Command, tmp_path: Path) -> None:
    """What needs no file and no cluster is run."""
    from typer.testing import CliRunner

    words = list(command.words[1:])
    if "-f" in words:
        pytest.skip("needs the reader's file")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", of("make"))
def test_make_has_the_verb(command: Command) -> None:
    """`make X` in the docs is a verb of the Makefile."""
    wanted = [word for word in command.words[1:] if "=" not in word]
    assert set(wanted) <= VERBS, command.place


@pytest.mark.parametrize("command", of("pip"))
def test_pip_installs_extras_that_exist(command: Command) -> None:
    """`pip install '.[check]'` names an extra of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    for word in command.words:
        if match := re.fullmatch(r"\.\[(\w+)\]", word):
            assert re.search(rf"^{match[1]} = \[", text, re.MULTILINE), command.place


@pytest.mark.apiserver
@pytest.mark.parametrize("command", [*of("kubectl"), *of("helm")])
def test_kubectl_and_helm_know_the_subcommand_and_its_flags(command: Command) -> None:
    """Both check flags before they print their help."""
    name, *words = command.words
    options = words[: words.index("--")] if "--" in words else words
    finished = subprocess.run([program(name), *options, "--help"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, f"{command.place}: {' '.join(command.words)}: {finished.stderr}"


@pytest.mark.parametrize("command", of("docker"))
def test_docker_builds_from_files_that_exist(command: Command) -> None:
    """`docker build -f FILE ... .`, from the repository's root."""
    assert command.words[1] == "build", command.place
    assert (ROOT / command.words[command.words.index("-f") + 1]).is_file(), command.place
    assert command.words[-1] == ".", command.place


def test_no_program_is_left_unchecked() -> None:
    """One that no test above looks at is named here, so that it is a decision and no oversight."""
    checked = {"kvshare", "make", "kubectl", "helm", "pip", "docker"}
    others = {"git", "python3", "export", "tar", "jq", "kustomize", "curl", "grep"}
    assert {one.words[0].rsplit("/", 1)[-1] for one in pages.COMMANDS} <= checked | others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_inside_sentences_exist(page: Path) -> None:
    """`make X` and `kvshare X` in running text name verbs and subcommands."""
    known = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - the group's type is typer's own
    for text in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text()):
        words = [word for word in text.split() if "=" not in word]
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in VERBS | {"X"}, text
        if words[:1] == ["kvshare"] and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in known, text


def test_commands_are_found() -> None:
    """A change of how pages are read must not make these tests empty."""
    assert len(pages.COMMANDS) >= 30
    found = {one.words[0] for one in pages.COMMANDS}
    assert {"kvshare", "make", "kubectl", "helm"} <= found


def test_reading_of_shell_blocks() -> None:
    """Pipes, chains, redirections, assignments, comments, prompts and continued lines."""
    text = "A=1 kvshare plan -f - > out.txt  # why\nmake a && make \\\n  b | sort\n"
    block = pages.Block(ROOT / "README.md", 1, "sh", text)
    assert [one.words for one in pages.commands(block)] == [
        ("kvshare", "plan", "-f", "-"), ("make", "a"), ("make", "b"), ("sort",),
    ]  # fmt: skip
    console = pages.Block(ROOT / "README.md", 1, "console", "$ make c\nmake output\n")
    assert [one.words for one in pages.commands(console)] == [("make", "c")]
