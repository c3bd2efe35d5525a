"""One version: pyproject.toml has it, and everywhere else says the same."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from release import versions


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> pathlib.Path:
    """The places of the version, as a small repository of their own."""
    for glob in {place.glob for place in (versions.SOURCE, *versions.PLACES)}:
        for path in versions.ROOT.glob(glob):
            target = tmp_path / path.relative_to(versions.ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return tmp_path


def test_the_repository_has_one_version() -> None:
    """`make generate` writes it from pyproject.toml."""
    assert versions.differing() == []


def test_a_new_version_reaches_every_place(copy: pathlib.Path) -> None:
    """Every file of the table changes, nothing but the version does, and writing again changes nothing."""
    before = {path: path.read_text() for path in copy.rglob("*") if path.is_file()}
    changed = versions.set_version("1.2.3", copy)
    assert versions.version(copy) == "1.2.3"
    assert versions.differing(copy) == []
    assert versions.write(copy) == []
    old = versions.version()
    for path, text in before.items():
        after = path.read_text()
        assert after.replace("1.2.3", old) == text
        assert (path in changed) == (after != text)
    assert {copy / "pyproject.toml", copy / "charts/kvshare/Chart.yaml"} <= set(changed)


def test_a_place_that_was_forgotten_is_named(copy: pathlib.Path) -> None:
    """Another version, or a pattern that matches nothing any more."""
    chart = copy / "charts" / "kvshare" / "Chart.yaml"
    chart.write_text(
        chart.read_text()
        .replace(f"version: {versions.version()}\n", "version: 9.9.9\n")
        .replace("appVersion", "appversion")
    )
    problems = versions.differing(copy)
    assert any("has 9.9.9" in text for text in problems)
    assert any("nothing matches" in text for text in problems)


@pytest.mark.parametrize("wrong", ["", "1", "1.2", "v1.2.3", "1.2.3.4", "one", "1.2.3; rm -rf /"])
def test_what_is_no_version_is_refused(copy: pathlib.Path, wrong: str) -> None:
    """And nothing is written."""
    with pytest.raises(ValueError, match=r"MAJOR\.MINOR\.PATCH expected"):
        versions.set_version(wrong, copy)
    assert versions.version(copy) == versions.version()
