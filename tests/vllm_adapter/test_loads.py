"""Loads: plans by request and generation."""

from kvshare_connector.scheduler.loads import Loads
from one_kind import full

HASHES = (b"a", b"b", b"c")


def test_a_plan_is_sent_once_and_finished_once() -> None:
    """Late and unknown reports change nothing."""
    loads = Loads()
    plan = loads.plan("r", 2, 3, full(range(2, 5), HASHES, (7, 8, 9)))
    assert loads.take() == (plan,)
    assert loads.take() == ()
    assert loads.finish(["r", "stranger"]) == [(plan, 3)]
    assert loads.finish(["r"]) == []
    assert loads.in_flight == 0


def test_bad_blocks_of_every_step_count() -> None:
    """One rank reports block 9 first, another block 8 two steps later; the shortest prefix is what is proven."""
    loads = Loads()
    plan = loads.plan("r", 0, 3, full(range(3), HASHES, (7, 8, 9)))
    loads.take()
    loads.invalid(frozenset({9, 100}))
    loads.invalid(frozenset())
    loads.invalid(frozenset({8}))
    loads.invalid(frozenset({9}))
    assert loads.finish(["r"]) == [(plan, 1)]


def test_what_one_load_lacked_is_not_held_against_the_next() -> None:
    """C13: the same request and the same blocks, another generation."""
    loads = Loads()
    loads.plan("r", 0, 3, full(range(3), HASHES, (7, 8, 9)))
    loads.take()
    loads.invalid(frozenset({7}))
    loads.finish(["r"])
    second = loads.plan("r", 0, 3, full(range(3), HASHES, (7, 8, 9)))
    loads.take()
    assert loads.finish(["r"]) == [(second, 3)]


def test_zero_external_tokens_drop_what_was_not_sent() -> None:
    """The engine computes everything itself."""
    loads = Loads()
    loads.plan("r", 0, 3, full(range(3), HASHES, (7, 8, 9)))
    loads.drop("r")
    assert loads.take() == ()


def test_an_aborted_request_still_gets_its_finish_report() -> None:
    """D5: its blocks are freed by that report only, so the plan goes out without blocks."""
    loads = Loads()
    plan = loads.plan("r", 1, 3, full(range(1, 4), HASHES, (7, 8, 9)), epoch=4)
    loads.void("r")
    (sent,) = loads.take()
    assert (sent.generation, sent.count, sent.blocks, sent.epoch) == (plan.generation, 0, (), 4)
    loads.void("r")
    assert loads.finish(["r"]) == [(sent, 0)]


def test_a_load_is_unproven_from_its_first_block_until_it_has_finished() -> None:
    """Before and after it is sent."""
    loads = Loads()
    assert loads.unproven_from("r") is None
    loads.plan("r", 5, 3, full(range(5, 8), HASHES, (7, 8, 9)))
    assert loads.unproven_from("r") == 5
    loads.take()
    assert loads.unproven_from("r") == 5
    loads.finish(["r"])
    assert loads.unproven_from("r") is None
