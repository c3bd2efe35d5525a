"""Resets: when no old key can come back any more."""

from kvshare_connector.scheduler.resets import Resets


def test_a_reset_is_over_after_the_ranks_and_both_removals() -> None:
    """C10: the first removal empties, the second takes what landed late."""
    resets = Resets(2)
    assert not resets.under_way
    resets.begin(1)
    first = resets.removal_started()
    resets.removed(first)
    assert resets.under_way
    assert resets.waits_for_ranks
    assert not resets.settled(1, 1)
    assert resets.settled(1, 1)
    second = resets.removal_started()
    assert not resets.waits_for_ranks
    assert resets.under_way
    resets.removed(second)
    assert not resets.under_way


def test_a_removal_that_does_not_work_keeps_the_reset_open() -> None:
    """An old key may still be there, so nothing is looked up."""
    resets = Resets(1)
    resets.begin(1)
    first = resets.removal_started()
    resets.settled(1, 1)
    resets.removed(resets.removal_started())
    assert resets.under_way
    resets.removed(first)
    assert not resets.under_way


def test_a_second_reset_covers_the_first() -> None:
    """Reports about the first are late, and reports that come twice count for nothing."""
    resets = Resets(2)
    resets.begin(1)
    resets.settled(1, 1)
    resets.begin(2)
    assert not resets.settled(1, 1)
    assert not resets.settled(2, 1)
    assert resets.settled(2, 1)
    assert not resets.settled(2, 1)
