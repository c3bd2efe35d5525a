"""When a client object is replaced."""

import itertools

from kvshare_connector.store.suspicion import PAUSE_SECONDS, Suspicion


def test_trouble_that_lasts_longer_than_a_dead_node_raises_an_alarm() -> None:
    """The keys that cast doubt are returned."""
    suspicion = Suspicion()
    assert [suspicion.watch(["a", "b"], [-800, 10], t) for t in (0, 5, 10, 11.9)] == [()] * 4
    assert suspicion.watch(["a", "b"], [-800, 10], 12) == ("a",)


def test_clean_calls_in_between_prove_nothing() -> None:
    """They may have gone to another node."""
    suspicion = Suspicion()
    for t in range(12):
        assert suspicion.watch(["a"], [-800 if t % 4 == 0 else 10], t) == ()
    assert suspicion.watch(["a"], [-800], 12) == ("a",)


def test_a_dead_node_raises_no_alarm() -> None:
    """The master forgets it after about ten seconds; then its keys are misses."""
    suspicion = Suspicion()
    for t in range(11):
        assert suspicion.watch(["a"], [-800], t) == ()
    for t in range(11, 200):
        assert suspicion.watch(["a"], [-704], t) == ()


def test_rare_trouble_is_forgotten() -> None:
    """One failure a minute is not a series."""
    suspicion = Suspicion()
    assert [suspicion.watch(["a"], [-800], 61.0 * t) for t in range(50)] == [()] * 50


def test_misses_and_a_missing_master_are_no_reason() -> None:
    """A new client would see the same."""
    suspicion = Suspicion()
    for code in (-704, -703, -707, -900, -901, -200, -600, 0, 100):
        for t in range(60):
            assert suspicion.watch(["a"], [code], t) == ()


def test_alarms_have_a_bounded_rate() -> None:
    """Trouble that stays costs one new client in half a minute at most."""
    suspicion = Suspicion()
    alarms = [t for t in range(600) if suspicion.watch(["a"], [-800], t)]
    assert alarms[0] == 12
    assert all(b - a >= PAUSE_SECONDS for a, b in itertools.pairwise(alarms))
    assert len(alarms) <= 20
