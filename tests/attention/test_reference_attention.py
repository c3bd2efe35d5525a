"""The reference attention gives torch's result for every physical layout of the cache."""

import itertools

import pytest
import torch

from testbed.reference_attention import attend, write_cells

BLOCKS, HEADS, BLOCK_TOKENS, HEAD_SIZE, GROUP = 6, 2, 16, 8, 3
AXIS_ORDERS = list(itertools.permutations(range(3)))


def cache_in_order(order: tuple[int, ...]) -> torch.Tensor:
    """A poisoned cache `[B, H, N, C]` whose axes B, H, N lie in memory in the given order."""
    shape = (BLOCKS, HEADS, BLOCK_TOKENS)
    memory = torch.full((*(shape[axis] for axis in order), 2 * HEAD_SIZE), float("nan"))
    return memory.permute(*(order.index(axis) for axis in range(3)), 3)


@pytest.mark.parametrize("order", AXIS_ORDERS)
@pytest.mark.parametrize("window", [-1, 5])
def test_every_axis_order_gives_what_torch_gives(order: tuple[int, ...], window: int) -> None:
    """Keys and values go into scattered blocks and come back as the same attention."""
    torch.manual_seed(0)
    tokens, new = 41, 7
    key, value = torch.randn(2, tokens, HEADS, HEAD_SIZE)
    query = torch.randn(new, HEADS * GROUP, HEAD_SIZE)
    blocks = torch.tensor([4, 0, 3])
    positions = torch.arange(tokens)
    slots = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    cache = cache_in_order(order)
    write_cells(cache, key, value, slots)
    cache[3].nan_to_num_(nan=0.0)  # the unwritten end of the last block
    found = attend(
        query,
        cache,
        blocks,
        context=tokens,
        head_size=HEAD_SIZE,
        scale=0.3,
        causal=True,
        window=window,
        softcap=0,
    )
    own = torch.arange(tokens - new, tokens)[:, None]
    visible = (positions <= own) & ((positions >= own - window) if window >= 0 else torch.tensor(True))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.permute(1, 0, 2),
        key.permute(1, 0, 2).repeat_interleave(GROUP, 0),
        value.permute(1, 0, 2).repeat_interleave(GROUP, 0),
        attn_mask=visible,
        scale=0.3,
    ).permute(1, 0, 2)
    torch.testing.assert_close(found, expected)


def test_padding_slots_are_not_written() -> None:
    """A negative slot belongs to no token; more slots than tokens are vLLM's padding."""
    cache = cache_in_order((0, 1, 2))
    key = value = torch.ones(2, HEADS, HEAD_SIZE)
    write_cells(cache, key, value, torch.tensor([-1, 3, 5]))
    written = ~cache.isnan()
    assert written[0, :, 3].all()
    assert int(written.sum()) == HEADS * 2 * HEAD_SIZE


def test_softcap_limits_the_scores() -> None:
    """Two far-apart scores come close to each other, so both values count."""
    cache = cache_in_order((0, 1, 2))
    key = torch.stack([torch.full((HEADS, HEAD_SIZE), 50.0), torch.full((HEADS, HEAD_SIZE), -50.0)])
    value = torch.stack([torch.ones(HEADS, HEAD_SIZE), torch.zeros(HEADS, HEAD_SIZE)])
    write_cells(cache, key, value, torch.tensor([0, 1]))
    query = torch.ones(1, HEADS, HEAD_SIZE)
    found = attend(
        query,
        cache,
        torch.tensor([0]),
        context=2,
        head_size=HEAD_SIZE,
        scale=1.0,
        causal=False,
        window=-1,
        softcap=0.5,
    )
    assert 0.5 < float(found.mean()) < 0.75
