"""Lookup: what may be answered now, without waiting and without asking twice."""

import pytest

from kvshare_connector.scheduler.lookup import Lookups, Question

HASHES = tuple(bytes([i]) * 4 for i in range(8))


@pytest.fixture
def lookups() -> Lookups:
    """Timeout 5 s, reuse 4 s, forget 1 s."""
    return Lookups(timeout=5, reuse=4, forget=1)


def _asked(lookups: Lookups, *, start: int = 0, now: float = 0.0, hashes: tuple[bytes, ...] = HASHES) -> Question:
    result = lookups.ask("r", start, hashes, now)
    assert isinstance(result, Question)
    return result


def test_a_question_is_asked_once_and_answered_when_the_answer_is_there(lookups: Lookups) -> None:
    """Until then the engine is asked to come again, as often as it likes."""
    question = _asked(lookups, start=2)
    assert question.block_hashes == HASHES[2:]
    assert [lookups.ask("r", 2, HASHES, t) for t in (0.1, 1, 4.9)] == [None] * 3
    lookups.answer("r", question.serial, 3, 4.9)
    assert lookups.ask("r", 2, HASHES, 5) == 3
    assert lookups.ask("r", 4, HASHES, 5) == 1
    assert lookups.ask("r", 6, HASHES, 5) == 0


def test_an_overdue_question_is_a_miss_and_its_late_answer_is_ignored(lookups: Lookups) -> None:
    """Time is money, answers are not: the request goes on."""
    question = _asked(lookups)
    assert lookups.ask("r", 0, HASHES, 5.1) == 0
    assert lookups.timeouts == 1
    lookups.answer("r", question.serial, 8, 5.2)
    assert lookups.ask("r", 0, HASHES, 5.3) == 0


def test_a_positive_answer_ages(lookups: Lookups) -> None:
    """After less than half a lease the store is asked again."""
    lookups.answer("r", _asked(lookups).serial, 8, 0.5)
    assert lookups.ask("r", 0, HASHES, 4.4) == 8
    assert _asked(lookups, now=4.6).serial == 2


def test_a_shorter_local_hit_asks_again(lookups: Lookups) -> None:
    """What was asked does not cover blocks in front of it."""
    lookups.answer("r", _asked(lookups, start=4).serial, 4, 0)
    assert _asked(lookups, start=1, now=0.1).start == 1


def test_a_miss_holds_until_the_request_has_more_blocks(lookups: Lookups) -> None:
    """A preempted request that has decoded blocks of its own may find more than its prompt did."""
    lookups.answer("r", _asked(lookups, hashes=HASHES[:4]).serial, 0, 0)
    assert lookups.ask("r", 0, HASHES[:4], 100) == 0
    assert _asked(lookups, now=100).block_hashes == HASHES


def test_a_preempted_request_is_looked_up_anew(lookups: Lookups) -> None:
    """C13: a miss of a second ago says nothing about blocks that have been saved since."""
    lookups.answer("r", _asked(lookups).serial, 0, 0)
    assert lookups.ask("r", 0, HASHES, 1) == 0
    result = lookups.ask("r", 0, HASHES, 1, preemptions=1)
    assert isinstance(result, Question)
    assert lookups.ask("r", 0, HASHES, 1, preemptions=1) is None


def test_after_a_failed_load_every_answer_is_no_hit_until_blocks_are_allocated(lookups: Lookups) -> None:
    """F3: a refused allocation repeats the lookup; answering "no hit" once would loop."""
    lookups.bypass("r")
    assert [lookups.ask("r", 0, HASHES, t) for t in (0, 1, 50)] == [0] * 3
    lookups.allocated_without_hit("r")
    _asked(lookups, now=51)


def test_blocks_that_could_not_be_read_count_as_missing_for_a_moment(lookups: Lookups) -> None:
    """D15: an object that exists and cannot be read must not send everybody into the same failure."""
    lookups.answer("r", _asked(lookups).serial, 8, 0)
    lookups.load_failed((HASHES[3],), 0.5)
    assert lookups.ask("r", 0, HASHES, 1) == 3
    assert lookups.ask("r", 0, HASHES, 1.6) == 8


def test_a_hit_that_cannot_be_shortened_is_none_for_that_moment(lookups: Lookups) -> None:
    """With windows a shorter hit may need blocks that nobody has looked for; behind the hit nothing matters."""
    lookups.answer("r", _asked(lookups).serial, 6, 0)
    lookups.load_failed((HASHES[7],), 0.5)
    assert lookups.ask("r", 0, HASHES, 1, whole=True) == 6
    lookups.load_failed((HASHES[3],), 1)
    assert lookups.ask("r", 0, HASHES, 1.5, whole=True) == 0
    assert lookups.ask("r", 0, HASHES, 2.1, whole=True) == 6


def test_a_reset_voids_answers_under_way(lookups: Lookups) -> None:
    """C10: the old answer to a new question is not taken."""
    old = _asked(lookups)
    lookups.forget_answers()
    new = _asked(lookups)
    lookups.answer("r", old.serial, 8, 0)
    assert lookups.ask("r", 0, HASHES, 0) is None
    assert list(lookups.open.values()) == [new.serial]


def test_a_request_that_has_gone_leaves_nothing(lookups: Lookups) -> None:
    """Its late answer is nobody's."""
    question = _asked(lookups)
    lookups.bypass("other")
    lookups.forget("r")
    lookups.forget("other")
    lookups.answer("r", question.serial, 8, 0)
    assert not lookups.open
    _asked(lookups)


def test_nothing_beyond_the_local_hit_is_not_asked(lookups: Lookups) -> None:
    """The last token is always computed, so a full local hit leaves no block to load."""
    assert lookups.ask("r", 8, HASHES, 0) == 0
    assert lookups.ask("r", 0, (), 0) == 0
