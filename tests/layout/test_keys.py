"""Keys: injective, readable back, and the same in every process."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout import keys
from kvshare_layout.errors import LayoutError
from kvshare_layout.kinds import Retention

hexes = st.text("0123456789abcdef", min_size=16, max_size=64)
generations = st.integers(1, keys.MAX_GENERATION)
prefixes = st.builds(
    keys.pool_prefix, st.text(max_size=9), st.text(max_size=9), st.text(max_size=9), st.none() | st.text(), generations
)
namespaces = st.builds(lambda p, f, i: keys.namespace(p, f, isolated=i), prefixes, hexes, st.booleans())
kinds = st.one_of(
    st.sampled_from(["full", "state", "s1p2", "ks0p0-s1", "a"]),
    st.integers(1, 1 << 20).map(lambda w: Retention("window", w).name),
    st.from_regex(r"[a-z][a-z0-9-]{0,30}", fullmatch=True),
)
parts = st.tuples(namespaces, st.binary(min_size=1, max_size=40), kinds, st.integers(0, 999), st.integers(0, 99))


@given(parts)
def test_keys_are_read_back_as_they_were_made(made: tuple[str, bytes, str, int, int]) -> None:
    """Namespace, hash, kind, shard, stage: so no two objects share a key."""
    assert keys.parse_object_key(keys.object_key(*made)) == made


@given(st.lists(parts, unique=True, min_size=2, max_size=20))
def test_different_objects_have_different_keys(made: list[tuple[str, bytes, str, int, int]]) -> None:
    """Over generated sets of objects; none of them is a manifest or a group."""
    texts = {keys.object_key(*one) for one in made}
    assert len(texts) == len(made)
    assert texts.isdisjoint({keys.group_id(one[0], one[1]) for one in made})


@given(
    st.lists(
        st.tuples(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.none() | st.text(max_size=4)),
        unique=True,
        min_size=2,
        max_size=30,
    )
)
def test_different_pools_have_different_prefixes(pools: list[tuple[str, str, str, str | None]]) -> None:
    """Also when their names only differ in where one ends and the next begins."""
    made = {keys.pool_prefix(*pool, generation=1) for pool in pools}
    assert len(made) == len(pools)
    assert all(keys.is_pool_prefix(prefix) for prefix in made)


def test_neighbouring_names_do_not_run_together() -> None:
    """``a/bc`` is not ``ab/c``; no revision is not an empty one; a generation is a prefix of its own."""
    made = {
        keys.pool_prefix("a", "bc", "m", None, 1),
        keys.pool_prefix("ab", "c", "m", None, 1),
        keys.pool_prefix("a", "bc", "m", "", 1),
        keys.pool_prefix("a", "bc", "m", "None", 1),
        keys.pool_prefix("a", "bc", "m", "null", 1),
        keys.pool_prefix("a", "bc", "m", None, 2),
        keys.pool_prefix("a", "bc", "m", None, 11),
    }
    assert len(made) == 7


def test_a_prefix_is_the_same_in_another_process() -> None:
    """Whatever the hash seed: the operator restarts, pools are re-created."""
    code = "from kvshare_layout.keys import pool_prefix; print(pool_prefix('ns', 'pool', 'org/Model', 'r1', 3))"
    for seed in ("0", "1", "random"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == keys.pool_prefix("ns", "pool", "org/Model", "r1", 3)
    assert keys.pool_prefix("ns", "pool", "org/Model", "r1", 3) == "kvs1/p-65e608559e79/g3"


@pytest.mark.parametrize("generation", [0, -1, keys.MAX_GENERATION + 1])
def test_generations_that_no_prefix_can_hold_are_refused(generation: int) -> None:
    """Zero, negative, too many digits."""
    with pytest.raises(LayoutError, match="generation"):
        keys.pool_prefix("a", "b", "c", None, generation)


@given(hexes)
def test_isolated_and_shared_namespaces_never_meet(digest: str) -> None:
    """The same digest has a letter of its own."""
    prefix = keys.DEFAULT_POOL_PREFIX
    assert keys.namespace(prefix, digest) != keys.namespace(prefix, digest, isolated=True)
    assert keys.manifest_key(prefix) not in (
        keys.namespace(prefix, digest),
        keys.namespace(prefix, digest, isolated=True),
    )


@pytest.mark.parametrize(
    ("prefix", "digest"), [("kvs1/p-x", "0" * 16), ("kvs1/p-x/g0", "0" * 16), ("", "0" * 16), ("kvs1/p-x/g1", "xyz")]
)
def test_malformed_namespaces_are_refused(prefix: str, digest: str) -> None:
    """The message has both parts."""
    with pytest.raises(LayoutError, match="hex expected"):
        keys.namespace(prefix, digest)


@pytest.mark.parametrize(
    ("kind", "shard", "stage"), [("", 0, 0), ("Full", 0, 0), ("a/b", 0, 0), ("a", -1, 0), ("a", 0, -1)]
)
def test_malformed_objects_are_refused(kind: str, shard: int, stage: int) -> None:
    """Kinds are lower-case names, shards and stages count from 0."""
    with pytest.raises(LayoutError, match="given"):
        keys.object_suffix(kind, shard, stage)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    """Never another exception."""
    with pytest.raises(LayoutError, match="expected"):
        keys.parse_object_key(text)
