"""Puts over TCP: memory for which bytes may still be on their way is given to nobody else."""

from typing import Any

from kvshare_connector.store import codes
from kvshare_connector.store.held import put_held


class Sessions:
    """Mooncake's put sessions, with what each key is answered and how long it takes."""

    def __init__(self, begun: dict[str, int], moved: dict[str, tuple[int, float]]) -> None:
        self.begun, self.moved = begun, moved
        self.now = 0.0
        self.config: object = None
        self.sent: list[tuple[str, list[int], list[int], list[int]]] = []
        self.ended: list[str] = []
        self.revoked: list[str] = []

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: object) -> list[int]:
        """Reserve memory."""
        self.config = config
        assert all(sizes)
        return [self.begun.get(key, 0) for key in keys]

    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]:
        """Send one object."""
        (key,) = keys
        self.sent.append((key, addresses[0], sizes[0], offsets[0]))
        code, seconds = self.moved.get(key, (sum(sizes[0]), 0.0))
        self.now += seconds
        return [code]

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        """Make objects readable."""
        self.ended += keys
        return [0] * len(keys)

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        """Give memory back."""
        self.revoked += keys
        return [0] * len(keys)

    def put(self, keys: str) -> list[int]:
        """Put objects of two segments."""
        count = len(keys)
        return put_held(self, list(keys), [[8, 24]] * count, [[4, 6]] * count, "config", clock=lambda: self.now)


def test_objects_are_sent_one_by_one_and_ended_together() -> None:
    """Segments follow each other in the object."""
    made = Sessions({}, {})
    assert made.put("ab") == [0, 0]
    assert made.sent == [("a", [8, 24], [4, 6], [0, 4]), ("b", [8, 24], [4, 6], [0, 4])]
    assert (made.ended, made.revoked, made.config) == (["a", "b"], [], "config")


def test_a_key_that_exists_is_a_success_and_others_keep_their_codes() -> None:
    """As in a put of one call."""
    made = Sessions({"a": -705, "c": codes.NO_SPACE}, {})
    assert made.put("abc") == [0, 0, codes.NO_SPACE]
    assert (made.ended, made.revoked) == (["b"], [])


def test_what_failed_at_once_is_given_back() -> None:
    """The node is gone, so nothing can arrive there later."""
    made = Sessions({}, {"a": (codes.TRANSFER_FAIL, 0.1), "b": (7, 0.0)})
    assert made.put("abc") == [codes.TRANSFER_FAIL, codes.TRANSFER_FAIL, 0]
    assert (made.ended, made.revoked) == (["c"], ["a", "b"])


def test_what_was_waited_for_in_vain_stays_reserved() -> None:
    """F7: neither ended nor given back; what stands behind it is not sent, so it can be given back."""
    made = Sessions({}, {"b": (codes.TRANSFER_FAIL, 4.0)})
    assert made.put("abcd") == [0, codes.TRANSFER_FAIL, codes.TRANSFER_FAIL, codes.TRANSFER_FAIL]
    assert [key for key, *_ in made.sent] == ["a", "b"]
    assert (made.ended, made.revoked) == (["a"], ["c", "d"])


def test_a_refused_end_is_no_success() -> None:
    """The master has given the key to another writer meanwhile."""
    made = Sessions({}, {})
    refuse: Any = lambda keys: [-601] * len(keys)  # noqa: E731
    made.batch_put_session_end = refuse  # type: ignore[method-assign]
    assert made.put("a") == [-601]
