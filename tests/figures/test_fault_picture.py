"""The picture of the fault trials."""

from pathlib import Path

from testbed import fault_picture, reliability
from testbed.fault_trials import Outcome

OUTCOME = Outcome("removed", "objects removed", "2026-01-01", 9, 1.5, 2.5, 3.0, 4.0, {"loaded blocks": 5})
PAGE = f"before\n{reliability.START}\nold\n{reliability.END}\nafter\n"


def test_every_row_is_in_table_and_picture_and_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    """Text stays text, so that a change shows in a comparison; what is not a trial's stays."""
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text(PAGE)
    reliability.keep(OUTCOME, rows=rows, page=page)
    first = (tmp_path / reliability.PICTURE).read_text()
    assert "objects removed" in first
    assert "| objects removed | 9 | 0 | 0 | x 1.5 | x 2.5 | 3.0 s | 4 s | 5 loaded blocks |" in page.read_text()
    assert (page.read_text()[:7], page.read_text()[-6:]) == ("before\n", "after\n")
    reliability.keep(OUTCOME, rows=rows, page=page)
    assert (tmp_path / reliability.PICTURE).read_text() == first
    fault_picture.draw([{**vars(OUTCOME), "median_ratio": 9.0}], tmp_path / "other.svg")
    assert (tmp_path / "other.svg").read_text() != first
