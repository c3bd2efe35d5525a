"""The changelog tells about a version before it is released, and dates it when it is."""

from __future__ import annotations

import datetime

import pytest

from release import changelog

DAY = datetime.date(2026, 12, 1)
TEXT = "# Changelog\n\n## Unreleased\n\n* New.\n\n## 0.1.0 (2026-11-30)\n\n* First.\n"


def test_the_repositorys_changelog_tells_about_the_next_release() -> None:
    """Under its version, or still under Unreleased."""
    from release import versions

    assert changelog.problems(changelog.read(versions.ROOT), versions.version()) == []


def test_unreleased_becomes_the_version_and_a_new_one_begins() -> None:
    """Nothing else moves."""
    after = changelog.released(TEXT, "0.2.0", DAY)
    assert changelog.section(after, "Unreleased") == ""
    assert changelog.section(after, "0.2.0") == "* New."
    assert changelog.section(after, "0.1.0") == "* First."
    assert "## 0.2.0 (2026-12-01)" in after


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        (TEXT, "0.1.0", "already"),
        ("# Changelog\n\n## Unreleased\n", "0.2.0", "nothing to release"),
        ("# Changelog\n", "0.2.0", "nothing to release"),
    ],
)
def test_a_release_without_news_or_with_an_old_version_is_refused(text: str, version: str, words: str) -> None:
    """Before anything is written."""
    with pytest.raises(ValueError, match=words):
        changelog.released(text, version, DAY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# Changelog\n", "neither"),
        ("# Changelog\n\n## Unreleased\n\n## 0.1.0 (2026-11-30)\n\n* x\n", "empty"),
        (TEXT + "\n## 0.1.0 (2026-10-30)\n\n* y\n", "twice"),
    ],
)
def test_a_changelog_that_says_nothing_is_a_problem(text: str, words: str) -> None:
    """For the version that is next."""
    (problem,) = changelog.problems(text, "0.2.0")
    assert words in problem
