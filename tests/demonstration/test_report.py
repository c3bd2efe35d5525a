"""The report says what happened, and whether it is right."""

from dataclasses import replace

import pytest

from testbed.demo.report import Report, Row

ROW = Row("decode reads", "decode", 1, "HND", 960, 976, True, 0, expected_cached=960)


def test_report_has_exactly_the_published_keys() -> None:
    """Others read this file; its keys are a promise."""
    written = Report(rows=[ROW], pool={"kind": "KVSharePool"}, refusal="denied", seconds={"total": 1.26}).to_json()
    assert set(written) == {"rows", "pool", "refusal", "seconds"}
    assert written["rows"] == [
        {
            "step": "decode reads",
            "engine": "decode",
            "tp": 1,
            "layout": "HND",
            "cached_tokens": 960,
            "prompt_tokens": 976,
            "tokens_match": True,
            "failed_keys": 0,
        }
    ]
    assert written["seconds"] == {"total": 1.3}


@pytest.mark.parametrize("wrong", [{"cached_tokens": 0}, {"tokens_match": False}, {"failed_keys": 2}])
def test_one_wrong_row_makes_the_report_wrong(wrong: dict[str, int]) -> None:
    """Too few cached tokens, other tokens, or failed keys."""
    assert Report(rows=[ROW]).right
    assert not Report(rows=[ROW, replace(ROW, **wrong)]).right  # type: ignore[arg-type]


def test_report_without_rows_or_with_a_problem_is_wrong() -> None:
    """Nothing asked is nothing proved."""
    assert not Report().right
    assert not Report(rows=[ROW], problems=["the pod with TP 3 was accepted"]).right
