"""Which nodes nothing is read from, and for how long."""

from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.store.avoided import AVOID_SECONDS, Avoided


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), max_size=20), st.floats(0, 200))
def test_a_node_is_avoided_for_its_time_after_each_offence(offences: list[tuple[str, float]], now: float) -> None:
    """Longest since the last one, and never for ever."""
    avoided = Avoided()
    for node, at in sorted(offences, key=lambda offence: offence[1]):
        avoided.add([node], at)
    assert avoided.nodes(now) == {node for node, at in offences if at + AVOID_SECONDS > now}
