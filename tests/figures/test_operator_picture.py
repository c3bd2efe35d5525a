"""The page and the picture of the operator under load, from the published figures."""

import json
from pathlib import Path

from bench.operator_page import page
from bench.operator_picture import draw
from testbed import places

FOLDER = places.REPOSITORY / "docs" / "benchmarks"


def test_page_and_picture_are_those_of_the_published_figures(tmp_path: Path) -> None:
    """Nobody has changed one of the three by hand."""
    found = json.loads((FOLDER / "operator.json").read_text())
    assert (FOLDER / "operator.md").read_text() == page(found)
    draw(found, tmp_path / "operator.svg")
    said = (tmp_path / "operator.svg").read_text()
    assert "without the webhook" in said
    assert f"{found['creation']['pods_a_second']:.0f}" in said
    draw(found, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == said
    found["creation"]["pods_a_second"] *= 2
    draw(found, tmp_path / "other.svg")
    assert (tmp_path / "other.svg").read_text() != said
