"""Pins: references on blocks while ranks read them."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.scheduler.pins import Pins


def _pins(budget: int, ranks: int) -> tuple[Pins, Counter[int]]:
    held: Counter[int] = Counter()

    def touch(block_ids: Sequence[int]) -> None:
        held.update(block_ids)

    def release(block_ids: Sequence[int]) -> None:
        held.subtract(block_ids)

    return Pins(budget, ranks, touch, release), held


def test_blocks_are_released_when_the_last_rank_has_reported() -> None:
    """B16: and not before, in whatever steps the reports come."""
    pins, held = _pins(10, 4)
    pins.pin(1, [3, 4])
    pins.reported(1, 1)
    pins.reported(1, 2)
    assert (held[3], pins.blocks, pins.jobs) == (1, 2, 1)
    pins.reported(1, 1)
    assert (held[3], pins.blocks, pins.jobs) == (0, 0, 0)


def test_reports_about_unknown_jobs_are_ignored() -> None:
    """A second report of a job must not take a reference that somebody else has."""
    pins, held = _pins(10, 1)
    pins.pin(1, [3])
    pins.pin(2, [3])
    pins.reported(1, 1)
    pins.reported(1, 1)
    pins.reported(99, 1)
    assert held[3] == 1


@given(st.integers(0, 20), st.lists(st.integers(0, 8), max_size=30), st.lists(st.booleans(), max_size=30))
def test_the_budget_holds(budget: int, wanted: list[int], reports: list[bool]) -> None:
    """F6: what does not fit is known before anything is pinned, and everything comes back."""
    early = iter(reports)
    pins, held = _pins(budget, 1)
    jobs: list[int] = []
    for number, count in enumerate(wanted):
        assert pins.room == budget - pins.blocks
        room = min(count, pins.room)
        if room:
            pins.pin(number, list(range(room)))
            jobs.append(number)
        assert pins.blocks <= budget
        if len(jobs) > 0 and next(early, False):
            pins.reported(jobs.pop(), 1)
    for job in jobs:
        pins.reported(job, 1)
    assert (pins.blocks, +held) == (0, Counter())
