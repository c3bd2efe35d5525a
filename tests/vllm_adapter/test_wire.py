"""Wire: reports of ranks merge in any order, in any grouping."""

import pickle
from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.wire import Report, Step
from one_kind import load_plan, save_job

counts = st.dictionaries(st.integers(0, 5), st.integers(1, 3), max_size=4)
hashes = st.frozensets(st.binary(min_size=1, max_size=2), max_size=4)
reports = st.builds(
    Report, st.dictionaries(st.integers(0, 7), st.just("{}"), max_size=3), counts, hashes, hashes, counts
)


@given(st.lists(reports, min_size=1, max_size=6), st.randoms())
def test_merging_does_not_depend_on_order(given_reports: list[Report], dice: object) -> None:
    """C16: whatever tree the engine aggregates in, every rank's part arrives."""
    forwards = reduce(Report.merge, given_reports)
    backwards = reduce(lambda a, b: b.merge(a), reversed(given_reports))
    assert forwards == backwards
    for number in forwards.released:
        assert forwards.released[number] == sum(r.released.get(number, 0) for r in given_reports)
    assert forwards.unread == frozenset().union(*(r.unread for r in given_reports))
    assert forwards.facts.keys() == set().union(*(r.facts for r in given_reports))


@given(reports)
def test_an_empty_report_changes_nothing(report: Report) -> None:
    """And is recognised as empty, so that it is not sent."""
    before = pickle.dumps(report)
    assert report.merge(Report()) == Report().merge(report) == report
    assert pickle.dumps(report) == before
    assert Report().empty
    assert report.empty == (report == Report())


def test_messages_survive_the_way_to_another_process() -> None:
    """They are pickled, for every step and every rank."""
    step = Step(None, 3, (load_plan("r", 1, (b"h",), (4,), 3),), (save_job(1, 3, (0,), (b"h",), (4,)),))
    assert pickle.loads(pickle.dumps(step)) == step
