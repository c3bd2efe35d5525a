"""Which keys of a store are nobody's any more: decided on plain values, on the safe side."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout import keys
from kvshare_operator.core.store.leftovers import Reference, group_keys, judge, pattern, prefix_of
from stored_keys import block_keys, prefix_at

FOREIGN = [
    "kvs1/p-x/g1/other", "kvs2/p-x/g1/manifest", "kvs1/p-x/g0/manifest", "some/other/key", "", "manifest",
    "kvs1/p-x/g1/f-abcdefabcdefabcd/00/kfulls0p0x", f"x{prefix_at(1)}/manifest", f"{prefix_at(1)}/manifest/more",
]  # fmt: skip


def states(found: list[str], pools: list[Reference], others: list[Reference] | None = None) -> dict[str, str]:
    """Reason by prefix."""
    groups, _ = group_keys(found)
    return {row.group.prefix: row.reason for row in judge(groups, pools, others or [])}


def test_keys_are_counted_by_namespace_and_what_is_not_ours_is_only_counted() -> None:
    """Objects of one namespace and suffix are equally large, so one sample of each suffix is kept."""
    found, foreign = group_keys([*block_keys(prefix_at(1), 3), *FOREIGN])
    assert foreign == len(FOREIGN)
    assert [(group.fingerprint[:2], group.objects) for group in found] == [("f-", 6), ("ma", 1)]
    assert sorted(found[0].samples) == ["kfulls0p0", "kfulls1p0"]


def test_only_a_generation_below_the_pools_is_old() -> None:
    """The pool's own stays, and so does a higher one, which the pool may come to."""
    found = [key for generation in (1, 2, 3) for key in block_keys(prefix_at(generation), 1)]
    assert states(found, [Reference(prefix_at(2), "pool ns-a/p1")]) == {
        prefix_at(1): "OldGeneration", prefix_at(2): "PoolRefers", prefix_at(3): "NewerGeneration",
    }  # fmt: skip


def test_prefix_that_no_pool_has_is_never_old() -> None:
    """It may belong to another cluster with the same store, or to an engine that was set up by hand."""
    found = [*block_keys(prefix_at(1, "other"), 1), *block_keys(keys.DEFAULT_POOL_PREFIX, 1)]
    assert set(states(found, [Reference(prefix_at(2), "pool ns-a/p1")]).values()) == {"NoPool"}


def test_old_generation_that_a_pod_still_uses_stays() -> None:
    """A pod that was not restarted reads and writes there."""
    others = [Reference(prefix_at(1), "pod ns-a/decode-0"), Reference(prefix_at(1), "pod ns-a/decode-1")]
    groups, _ = group_keys(block_keys(prefix_at(1), 1))
    for row in judge(groups, [Reference(prefix_at(2), "pool ns-a/p1")], others):
        assert (row.state, row.message) == ("inUse", "pod ns-a/decode-0 and 1 more still uses it")


@pytest.mark.parametrize("key", FOREIGN)
def test_pattern_never_matches_what_is_not_ours(key: str) -> None:
    """What is not of our grammar stays, whatever it begins with."""
    assert not re.search(pattern("kvs1/p-x/g1"), key)
    assert not re.search(pattern(prefix_at(1)), key)


@given(
    st.sampled_from([prefix_at(1), prefix_at(11), "kvs1/p-a.b/g1", "kvs1/p-axb/g1", "kvs1/p-default/g1"]),
    st.sampled_from([prefix_at(1), prefix_at(11), "kvs1/p-a.b/g1", "kvs1/p-axb/g1", "kvs1/p-default/g1"]),
    st.text("0123456789abcdef", min_size=16, max_size=64),
    st.booleans(),
)
def test_pattern_matches_all_keys_of_its_prefix_and_of_no_other(
    prefix: str, other: str, fingerprint: str, isolated: bool
) -> None:
    """Generation 1 is not generation 11, and a dot is a dot."""
    name = keys.namespace(other, fingerprint, isolated=isolated)
    for key in (keys.object_key(name, b"\x00\xff" * 16, "mla-latent", 12, 3), keys.manifest_key(other)):
        assert bool(re.search(pattern(prefix), key)) == (prefix == other)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (keys.namespace(prefix_at(3), "ab" * 16), prefix_at(3)), (prefix_at(3), prefix_at(3)), ("", ""), ("n", ""),
        ("kvs1/p-x", ""),
    ],
)  # fmt: skip
def test_prefix_of_whatever_pods_report(text: str, expected: str) -> None:
    """Namespaces and prefixes alike; nonsense is nothing."""
    assert prefix_of(text) == expected
