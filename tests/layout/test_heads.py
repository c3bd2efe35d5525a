"""Heads: ranks, shards and the Store TP size, over every size that vLLM accepts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.errors import LayoutError
from kvshare_layout.heads import effective_tp, head_share, normalise_store_tp, resolve_store_tp, tp_problem
from strategies import Pool, kv_heads, pools, tp_sizes


@given(pools())
def test_every_head_is_covered_once_by_consecutive_whole_shards(pool: Pool) -> None:
    """For every TP size of a pool, over the ranks of one replica each."""
    store_tp = resolve_store_tp(pool.sizes, kv_heads=pool.kv_heads).size
    width = pool.kv_heads // store_tp
    for tp in pool.sizes:
        shares = [head_share(tp, rank, pool.kv_heads, store_tp) for rank in range(tp)]
        first = [share for share in shares if share.replica == 0]
        assert [h for share in first for h in share.kv_heads] == list(range(pool.kv_heads))
        assert [s for share in first for s in share.shards] == list(range(store_tp))
        for share in shares:
            heads = [h for shard in share.shards for h in range(shard * width, (shard + 1) * width)]
            assert heads == list(share.kv_heads)


@given(kv_heads, st.data())
def test_ranks_hold_what_vllm_gives_them(heads: int, data: st.DataObject) -> None:
    """The rule of the engine's own projections: rank r of R replicas holds head range ``r // R``."""
    tp = data.draw(st.sampled_from(tp_sizes(heads)))
    for rank in range(tp):
        share = head_share(tp, rank, heads, heads)
        if tp >= heads:
            assert share.kv_heads == range(rank // (tp // heads), rank // (tp // heads) + 1)
        else:
            assert share.kv_heads == range(rank * heads // tp, (rank + 1) * heads // tp)


@given(kv_heads, st.data())
def test_replicas_write_in_turn(heads: int, data: st.DataObject) -> None:
    """Every shard of every block is written exactly once over all ranks (case B3)."""
    tp = data.draw(st.sampled_from(tp_sizes(heads)))
    shares = [head_share(tp, rank, heads, heads) for rank in range(tp)]
    assert len({share.replicas for share in shares}) == 1
    for block in range(2 * shares[0].replicas + 1):
        written = [shard for share in shares if share.writes(block) for shard in share.shards]
        assert sorted(written) == list(range(heads))


@given(pools())
def test_a_valid_pool_always_shares(pool: Pool) -> None:
    """S divides H and is a multiple of every effective size, and of nothing smaller than needed."""
    store_tp = resolve_store_tp(pool.sizes, kv_heads=pool.kv_heads)
    effective = [effective_tp(tp, pool.kv_heads) for tp in pool.sizes]
    assert store_tp.size == math.lcm(*effective)
    assert pool.kv_heads % store_tp.size == 0
    assert (store_tp.source, store_tp.provisional) == ("lcm", False)


@given(pools())
def test_the_provisional_size_normalises_to_the_final_one(pool: Pool) -> None:
    """The operator may not know H: the plain lcm becomes the lcm of the effective sizes."""
    plain = resolve_store_tp(pool.sizes, kv_heads=None)
    assert plain.provisional
    assert plain.size == math.lcm(*pool.sizes)
    assert normalise_store_tp(plain.size, pool.kv_heads) == resolve_store_tp(pool.sizes, kv_heads=pool.kv_heads).size


@given(pools(), st.integers(1, 256))
def test_a_pin_is_taken_when_every_size_divides_it(pool: Pool, pinned: int) -> None:
    """And refused otherwise, naming the pin."""
    size = min(pinned, pool.kv_heads)
    fits = pool.kv_heads % pinned == 0 or pinned % pool.kv_heads == 0
    if fits and all(size % effective_tp(tp, pool.kv_heads) == 0 for tp in pool.sizes):
        assert resolve_store_tp(pool.sizes, kv_heads=pool.kv_heads, pinned=pinned).size == size
    else:
        with pytest.raises(LayoutError, match=str(pinned)):
            resolve_store_tp(pool.sizes, kv_heads=pool.kv_heads, pinned=pinned)


@given(st.integers(1, 16), st.lists(st.integers(1, 16), min_size=1, max_size=3))
def test_a_pin_without_known_heads_is_refused_only_when_sizes_and_pin_do_not_nest(
    pinned: int, sizes: list[int]
) -> None:
    """A size above the pin may be right, with as many heads as the pin says."""
    if all(pinned % tp == 0 or tp % pinned == 0 for tp in sizes):
        found = resolve_store_tp(sizes, kv_heads=None, pinned=pinned)
        assert (found.size, found.source, found.provisional) == (pinned, "pinned", True)
    else:
        with pytest.raises(LayoutError, match=f"Store TP {pinned} pinned"):
            resolve_store_tp(sizes, kv_heads=None, pinned=pinned)


def test_all_mistakes_of_a_pool_are_named_at_once() -> None:
    """A bad size, another one, and a bad pin."""
    with pytest.raises(LayoutError) as error:
        resolve_store_tp([3, 0, 4], kv_heads=4, pinned=0)
    assert len(error.value.mistakes) == 3
    with pytest.raises(LayoutError, match="no TP size given"):
        resolve_store_tp([], kv_heads=4)


@given(st.integers(-2, 300), st.integers(-2, 300))
def test_a_size_is_refused_exactly_when_vllm_refuses_it(tp: int, heads: int) -> None:
    """Neither a divisor nor a multiple of the number of heads; the sentence names both."""
    problem = tp_problem(tp, heads)
    valid = tp >= 1 and heads >= 1 and (heads % tp == 0 or tp % heads == 0)
    assert (problem is None) == valid
    assert problem is None or str(tp) in problem or str(heads) in problem


@given(st.integers(-3, 40), st.integers(-3, 40), st.integers(-3, 40), st.integers(-3, 40))
def test_any_numbers_give_a_share_or_a_layout_error(tp: int, rank: int, heads: int, store_tp: int) -> None:
    """Never another exception, never a part of a shard."""
    try:
        share = head_share(tp, rank, heads, store_tp)
    except LayoutError:
        return
    assert len(share.kv_heads) % len(share.shards) == 0


@pytest.mark.parametrize(
    ("tp", "rank", "heads", "store_tp", "kv", "shards", "replica", "replicas"),
    [
        (4, 2, 8, 4, range(4, 6), range(2, 3), 0, 1),
        (2, 1, 8, 4, range(4, 8), range(2, 4), 0, 1),
        (8, 5, 2, 2, range(1, 2), range(1, 2), 1, 4),
        (4, 3, 1, 1, range(1), range(1), 3, 4),
        (1, 0, 8, 16, range(8), range(8), 0, 1),
    ],
)
def test_shares_worked_out_by_hand(
    tp: int, rank: int, heads: int, store_tp: int, kv: range, shards: range, replica: int, replicas: int
) -> None:
    """GQA, replicated GQA, MQA or MLA, and an S above H."""
    share = head_share(tp, rank, heads, store_tp)
    assert (share.kv_heads, share.shards, share.replica, share.replicas) == (kv, shards, replica, replicas)
