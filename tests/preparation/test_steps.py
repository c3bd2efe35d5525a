"""Preparation runs what is missing, says what it does, and explains a failure."""

from pathlib import Path

import pytest

from testbed import places
from testbed.prepare import runner
from testbed.prepare.command import Commands
from testbed.prepare.step import Step, key_of


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of these tests share nothing with the machine's real cache."""
    monkeypatch.setattr(places, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(places, "PREPARE_LOGS", tmp_path / "logs")


def touching(file: Path, *command: str) -> Step:
    """A step that is done when a file exists."""

    def act(commands: Commands) -> None:
        commands.run(command or ("touch", str(file)))

    return Step(f"make {file.name}", file.exists, act, "look at the disk")


def test_missing_result_is_made_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step runs once; the second time its line says so."""
    steps = [touching(tmp_path / "a"), touching(tmp_path / "b")]
    assert runner.run(steps)
    assert "[2/2] make b ... 0 s" in capsys.readouterr().out
    assert runner.run(steps)
    assert "[1/2] make a ... done before" in capsys.readouterr().out


def test_failed_command_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step, command, last lines and remedy; later steps do not run."""
    steps = [touching(tmp_path / "a", "sh", "-c", "echo first; echo disk full >&2; exit 3"), touching(tmp_path / "b")]
    assert not runner.run(steps)
    told = capsys.readouterr().err
    for part in ("step 1 of 2: make a", "sh -c", "exit code: 3", "disk full", "look at the disk"):
        assert part in told
    assert not (tmp_path / "b").exists()


def test_missing_program_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that does not exist is a failure of the step, not a crash."""
    assert not runner.run([touching(tmp_path / "a", "no-such-program-here")])
    assert "could not be started" in capsys.readouterr().err


def test_step_without_result_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that succeed without the result do not count as done."""
    assert not runner.run([touching(tmp_path / "a", "true")])
    assert "the result is not there" in capsys.readouterr().err


def test_key_changes_with_names_and_bytes_of_a_folder(tmp_path: Path) -> None:
    """A renamed file, a changed byte and a new file each give another key; a cache folder does not."""
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a").write_text("1")
    keys = [key_of(folder)]
    (folder / "inner" / "a").write_text("2")
    keys.append(key_of(folder))
    (folder / "inner" / "a").rename(folder / "inner" / "b")
    keys.append(key_of(folder))
    (folder / "c").write_text("")
    keys.append(key_of(folder))
    assert len(set(keys)) == 4
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("bytes")
    assert key_of(folder) == keys[-1]
