"""Cutting of large requests into calls, and the limit of segments in flight."""

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.store.batches import OVER_TCP, WIDE, InFlight, Limits, cut, rounds_without_repeats


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
def test_rounds_cover_every_index_once_without_repeats(keys: list[str]) -> None:
    """Each key's first place is in the first round, its second in the second."""
    rounds = list(rounds_without_repeats(keys))
    assert sorted(i for one in rounds for i in one) == list(range(len(keys)))
    for number, one in enumerate(rounds):
        names = [keys[i] for i in one]
        assert len(set(names)) == len(names)
        assert all(keys[:i].count(keys[i]) == number for i in one)


@given(st.lists(st.integers(0, 1500), max_size=200), st.sampled_from([WIDE, OVER_TCP]))
def test_calls_keep_order_and_limits(segments: list[int], limits: Limits) -> None:
    """Nothing is lost; only an object that is too large by itself exceeds the limit, alone."""
    calls = list(cut(range(len(segments)), segments, limits))
    assert [i for call in calls for i in call] == list(range(len(segments)))
    for call in calls:
        assert 1 <= len(call) <= limits.keys
        assert sum(segments[i] for i in call) <= limits.segments or len(call) == 1


def test_segments_in_flight_stay_below_the_limit() -> None:
    """Eight threads want more than fits; all get their turn, never too many at once."""
    room = InFlight(100)
    lock = threading.Lock()
    now, most, done = 0, 0, 0

    def work(wanted: int) -> None:
        nonlocal now, most, done
        for _ in range(20):
            with room.room(wanted):
                with lock:
                    now += min(wanted, 100)
                    most = max(most, now)
                time.sleep(0.0002)
                with lock:
                    now -= min(wanted, 100)
        with lock:
            done += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 30, 50, 99, 100, 5000, 64, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == len(threads)
    assert most <= 100


def test_room_is_given_back_after_an_exception() -> None:
    """A failing call does not eat the budget."""
    room = InFlight(10)
    for _ in range(3):
        try:
            with room.room(10):
                raise ValueError
        except ValueError:
            pass
    with room.room(10):
        pass
