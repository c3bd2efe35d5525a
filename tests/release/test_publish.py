"""Publishing with programs that only write down what they were asked."""

from __future__ import annotations

import os
import pathlib

import pytest

from release import __main__ as verbs
from release import publish, versions

VERSION = "1.2.3"


@pytest.fixture
def asked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A file with one line for each call of git, docker and helm; a call that begins as FAILS says fails."""
    log = tmp_path / "asked"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("git", "docker", "helm"):
        script = folder / name
        script.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {log}\ncase "{name} $*" in "${{FAILS:-nothing}}"*) exit 1;; esac\n'
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


def test_the_tag_is_pushed_last_and_images_are_built_first(asked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A build that fails is known to nobody else."""
    said: list[str] = []
    assert publish.run(publish.commands(VERSION), tmp_path, said.append)
    called = asked.read_text().splitlines()
    assert [line.split(" -")[0] for line in called[:2]] == ["docker build", "docker build"]
    assert called[-1] == "git push origin main v1.2.3"
    assert f"helm push build/release/kvshare-{VERSION}.tgz oci://ghcr.io/kvshare/charts" in called
    assert len(called) == len(publish.commands(VERSION)) == len(said)


def test_a_failure_stops_and_says_what_remains(
    asked: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is pushed to git; every command from the failed one on is printed."""
    monkeypatch.setenv("FAILS", "docker push")
    said: list[str] = []
    assert not publish.run(publish.commands(VERSION), tmp_path, said.append)
    assert "git push" not in asked.read_text()
    assert said[-1] == "  git push origin main v1.2.3"
    assert "  docker push ghcr.io/kvshare/kvshare-operator:1.2.3" in said


def test_dockerfiles_exist_and_images_are_the_charts() -> None:
    """What is pushed is what the chart and the command name."""
    values = (versions.ROOT / "charts" / "kvshare" / "values.yaml").read_text()
    for name in publish.IMAGES:
        assert (versions.ROOT / name / "Dockerfile").is_file()
        assert f"{publish.REGISTRY}/kvshare-{name}" in values


def test_nothing_is_published_unprepared(
    asked: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without artefacts and a dated section no program is called."""
    monkeypatch.setattr(verbs, "TARGET", tmp_path)
    monkeypatch.setattr(versions, "version", lambda: VERSION)
    assert verbs.main(["publish"]) == 2
    said = capsys.readouterr().err
    assert f"CHANGELOG.md has no section {VERSION!r}" in said
    assert f"make release VERSION={VERSION} first" in said
    assert not asked.exists()


def test_the_definition_is_kept_for_the_next_release(tmp_path: pathlib.Path) -> None:
    """And the list of wanted differences is empty again, with its head."""
    (tmp_path / "crd.yaml").write_text("a: 1\n")
    accepted = tmp_path / "accepted.txt"
    accepted.write_text("# why\nwanted\n")
    publish.keep(VERSION, tmp_path / "crd.yaml", tmp_path, accepted)
    assert (tmp_path / f"v{VERSION}.yaml").read_text() == "a: 1\n"
    assert accepted.read_text() == "# why\n"
