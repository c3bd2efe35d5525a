"""Every number that the store can answer with has a name, a meaning and a reaction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_connector.store import codes
from kvshare_connector.store.codes import CODES, Reaction, explain

#: Mooncake's numbers: single ones and whole families.
MOONCAKE = [
    0, -1, -10, *range(-103, -99), -200, -300, -400, -500, -600, -601, *range(-714, -699), -800, -801, -900, -901,
    *range(-1007, -999), -1010, -1011, -1012, *range(-1106, -1099), *range(-1203, -1199), -1300, -1301,
    *range(-1402, -1399), *range(-1503, -1499), *range(-1605, -1599), -1700, -1701, -1702,
]  # fmt: skip

REACTIONS = {
    0: Reaction.DONE,
    -200: Reaction.RETRY,
    -600: Reaction.DROP,
    -703: Reaction.MISS,
    -704: Reaction.MISS,
    -705: Reaction.DONE,
    -707: Reaction.MISS,
    -800: Reaction.REOPEN,
    -900: Reaction.RETRY,
    -901: Reaction.DROP,
    -1010: Reaction.DROP,
    -1011: Reaction.USER,
    -1701: Reaction.USER,
    codes.CLOSED: Reaction.DROP,
    codes.NO_ANSWER: Reaction.REOPEN,
    codes.CALL_RAISED: Reaction.REOPEN,
}


@pytest.mark.parametrize("number", MOONCAKE)
def test_every_mooncake_number_is_mapped(number: int) -> None:
    """No number of Mooncake's error list is unknown."""
    code = explain(number)
    assert code.number == number
    assert code.name != "UNKNOWN"
    assert code.name == code.name.upper()
    assert len(code.meaning) > 8 or number == 0


@pytest.mark.parametrize("number", REACTIONS)
def test_the_numbers_that_decide_something_have_their_reaction(number: int) -> None:
    """The reactions that the connector is built on."""
    assert explain(number).reaction is REACTIONS[number]


def test_names_and_numbers_are_used_once() -> None:
    """Metrics may be keyed by either."""
    assert len({code.name for code in CODES.values()}) == len(CODES)
    assert all(number == code.number for number, code in CODES.items())


def test_byte_counts_are_no_trouble() -> None:
    """A GET answers with bytes."""
    assert explain(32768).reaction is Reaction.DONE


@given(st.integers())
def test_any_number_is_explained(number: int) -> None:
    """Numbers of a later Mooncake lose one object, never an engine."""
    code = explain(number)
    assert code.number == number
    assert code.reaction in Reaction
    assert number >= 0 or number == -705 or code.reaction is not Reaction.DONE
