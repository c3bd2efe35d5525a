"""The table of the node's stories, from a report as pytest writes it."""

from pathlib import Path

from testbed import node_table

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" timestamp="2026-11-30T07:00:00.1">
<testcase classname="tests.node.test_story" name="test_it_begins" time="61.2" />
<testcase classname="tests.node.test_story" name="test_it_goes_on[a]" time="2.4"><failure message="x">y
</failure></testcase>
<testcase classname="tests.node.test_story" name="test_it_ends" time="0.1"><skipped message="x" /></testcase>
</testsuite></testsuites>
"""
STORY = '''"""A story about a pipe | and an end.

More about it.
"""


def test_it_begins() -> None:
    """F1: with a sentence.

    And another one.
    """


def test_it_goes_on() -> None:
    """Either | or."""


def test_it_ends() -> None:
    """At last."""
'''


def test_table_has_each_tests_sentence_time_and_result(tmp_path: Path) -> None:
    """Failed and skipped are said as such, and counted as not passed; the date is the run's."""
    (tmp_path / "tests" / "node").mkdir(parents=True)
    (tmp_path / "tests" / "node" / "test_story.py").write_text(STORY)
    report = tmp_path / "node.xml"
    report.write_text(REPORT)
    page = node_table.table(node_table.read_report(report), tmp_path)
    assert "2026-11-30, `make test-node`" in page
    assert "1 of 3 tests passed" in page
    assert "## Story" in page
    assert "A story about a pipe | and an end." in page
    rows = [line for line in page.splitlines() if line.startswith("| it ")]
    assert rows == [
        "| it begins | F1: with a sentence. | 61 | passed |",
        "| it goes on | Either \\| or. | 2 | failed |",
        "| it ends | At last. | 0 | skipped |",
    ]


def test_story_that_ran_again_has_its_last_result() -> None:
    """Reports of single stories are put together."""
    first = node_table.Row("f.py", "test_a", 1, "failed", "2026-11-30T07:00:00")
    other = node_table.Row("f.py", "test_b", 1, "passed", "2026-11-30T07:00:00")
    again = node_table.Row("f.py", "test_a", 2, "passed", "2026-11-30T08:00:00")
    assert set(node_table.latest([first, other, again])) == set(node_table.latest([again, first, other]))
    assert [row.result for row in node_table.latest([first, other, again])] == ["passed", "passed"]
