"""Fingerprint: equal for equal facts whatever their order and process, different for any difference."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.fingerprint import canonical_json, differing_fields, fingerprint, flatten

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
manifests = st.dictionaries(st.text(max_size=5), plain, max_size=5)


def _reversed(value: object) -> object:
    if isinstance(value, dict):
        return {key: _reversed(value[key]) for key in reversed(value)}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


@given(manifests)
def test_the_order_of_fields_does_not_matter(fields: dict[str, object]) -> None:
    """At any depth."""
    turned = _reversed(fields)
    assert isinstance(turned, dict)
    assert fingerprint(turned) == fingerprint(fields)


@given(manifests, manifests)
def test_different_facts_have_different_fingerprints(first: dict[str, object], second: dict[str, object]) -> None:
    """``1`` is not ``"1"`` and not ``true``."""
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (fingerprint(first) == fingerprint(second)) == same


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    """With another hash seed."""
    fields = {"b": [1, "ä", None], "a": {"y": True, "x": "1"}}
    code = f"from kvshare_layout.fingerprint import fingerprint; print(fingerprint({fields!r}))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == fingerprint(fields)


def test_numbers_that_have_no_json_are_refused() -> None:
    """NaN is equal to nothing, so it must not enter."""
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})


@given(manifests)
def test_a_manifest_differs_from_itself_in_nothing(fields: dict[str, object]) -> None:
    """And from nothing in all its fields."""
    flat = flatten(fields)
    assert differing_fields(flat, dict(reversed(flat.items()))) == ()
    assert differing_fields(flat, {}) == tuple(sorted(flat))


def test_differences_are_named_by_field() -> None:
    """Changed, added and missing ones; for people."""
    first = flatten({"kind.full": {"kv_heads": 8, "layers": [0, 1]}, "weights": "a", "old": None})
    second = flatten({"kind.full": {"kv_heads": 4, "layers": [0, 1]}, "weights": "a", "new": True})
    assert differing_fields(first, second) == ("kind.full.kv_heads", "new", "old")
    assert first == {"kind.full.kv_heads": "8", "kind.full.layers": "[0,1]", "weights": "a", "old": "null"}
