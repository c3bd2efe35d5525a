"""Completions: every load is reported once, and no step repeats what another has said."""

import threading

from kvshare_connector.worker.completions import Completions


def test_a_load_is_reported_once_with_its_bad_blocks() -> None:
    """D5, C15: the second step reports none."""
    done = Completions()
    assert done.load_started(1, "r")
    assert not done.load_started(1, "r")
    done.load_finished(1, [7], [b"h"])
    done.load_finished(1, [8], [b"i"])
    done.load_finished(2, [9], [b"j"])
    assert done.waiting
    assert done.drain_loads() == ({"r"}, set(), {7})
    assert done.drain_rest().unread == {b"h"}
    assert done.drain_loads() == (set(), set(), set())
    assert done.drain_rest().unread == set()
    assert not done.waiting


def test_what_was_drained_does_not_change_afterwards() -> None:
    """C15: the output object of one step is not used for the next."""
    done = Completions()
    done.save_started(1)
    done.save_released(1)
    first = done.drain_rest()
    done.save_started(2)
    done.save_released(2)
    done.save_released(2)
    done.save_failed([b"h"])
    done.settled(3)
    assert first.released == [1]
    second = done.drain_rest()
    assert (second.released, second.unsaved, second.settled) == ([2], {b"h"}, [3])


def test_many_threads_lose_nothing() -> None:
    """Each of 800 loads shows up in exactly one step."""
    done, seen = Completions(), list[str]()
    for number in range(800):
        done.load_started(number, f"r{number}")

    def finish(start: int) -> None:
        for number in range(start, 800, 8):
            done.load_finished(number, [number], ())

    threads = [threading.Thread(target=finish, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    while done.open_loads:
        seen += done.drain_loads()[0]
    for thread in threads:
        thread.join()
    seen += done.drain_loads()[0]
    assert sorted(seen) == sorted(f"r{n}" for n in range(800))
