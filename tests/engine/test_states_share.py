"""Real engines with recurrent states beside full attention (Qwen3-Next), shared by engines of one TP size.

vLLM makes the blocks as large as a state, here 544 tokens. What a reader answers with loaded blocks equals what it
answers when it computes the whole prompt itself; prompts end at and beside the ends of blocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from testbed import mooncake
from testbed.completions import Server
from testbed.engine import engine
from testbed.sharing import ENVIRONMENT, connector_flags, counted, member, objects, settle, text, troubles
from testbed.tiny_families import LAYERS, STATES_IN_FLOAT32, tiny_qwen_next

BLOCK, HEADS, ANSWER_TOKENS = 544, 4, 16
LENGTHS = [n + d for n in (BLOCK, 2 * BLOCK, 3 * BLOCK) for d in (-1, 0, 1)]
#: Every second layer has attention: K and V of 32 elements for each of 4 heads, bfloat16.
BLOCK_BYTES = LAYERS // 2 * BLOCK * HEADS * 2 * 32 * 2
#: The others have a state: 3 columns of a convolution in bfloat16, and 4 matrices in float32.
STATE_BYTES = LAYERS // 2 * (3 * 1024 * 2 + 4 * 128 * 128 * 4)


def states_of(length: int) -> int:
    """States that a prompt leaves behind: one, at the last end of a block before its last token."""
    return int((length - 1) // BLOCK > 0)


@contextmanager
def members(folder: Path, store: mooncake.Store, sizes: Sequence[int]) -> Iterator[list[Server]]:
    """Engines of these TP sizes in one pool."""
    # The pool says 32 tokens; the engine makes its blocks as large as a state.
    flags = [*connector_flags(store, store_tp=HEADS, save_decode_cache=False), STATES_IN_FLOAT32]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                engine(
                    folder, f"{number}-tp{tp}", tp=tp, dtype="bfloat16", model=tiny_qwen_next(),
                    environment=ENVIRONMENT, arguments=flags,
                )
            ).server
            for number, tp in enumerate(sizes)
        ]  # fmt: skip


def exchange(store: mooncake.Store, writer: Server, reader: Server, tp: int) -> None:
    """Write prompts of all lengths with one engine, read them with the other, compare answers, objects and bytes."""
    stored = len(objects(store))
    written = read = 0
    for seed, length in enumerate(LENGTHS):
        prompt, blocks = text(seed, length), (length - 1) // BLOCK
        # The salt keeps the prompt apart from itself: the reader computes all of it.
        expected = reader.complete(prompt, max_tokens=ANSWER_TOKENS, extra={"cache_salt": f"alone {tp}"})
        assert expected.cached_tokens == 0
        alone = length // BLOCK * HEADS + states_of(length) * LAYERS // 2 * tp
        stored += alone
        settle(store, stored)
        writer.complete(prompt, max_tokens=1)
        stored += alone
        settle(store, stored)
        written += length // BLOCK * BLOCK_BYTES + states_of(length) * STATE_BYTES
        answer = reader.complete(prompt, max_tokens=ANSWER_TOKENS)
        assert (answer.cached_tokens, answer.token_ids) == (blocks * BLOCK, expected.token_ids), length
        read += blocks * BLOCK_BYTES + (STATE_BYTES if blocks else 0)
    assert counted(writer, "kvshare_saved_bytes_total", written) == written
    assert counted(reader, "kvshare_loaded_bytes_total", read) == read
    assert [troubles(server) for server in (writer, reader)] == [{}, {}]


@pytest.mark.engine
def test_states_that_one_engine_left_behind_are_used_by_another(tmp_path: Path) -> None:
    """TP 1: a state for each prompt, at the last end of a block, and the blocks of attention before it."""
    with mooncake.store(tmp_path) as store, members(tmp_path, store, (1, 1)) as (writer, reader):
        exchange(store, writer, reader, 1)
        infos = [member(server) for server in (writer, reader)]
        assert [info["verdict"] for info in infos] == ["shared", "shared"]
        assert infos[0]["fingerprint"] == infos[1]["fingerprint"]


@pytest.mark.matrix
def test_states_of_two_ranks_are_used_by_two_ranks_and_by_nobody_else(tmp_path: Path) -> None:
    """TP 2 writes and reads; TP 1 finds nothing that ends at a state, and blocks of attention are stored once."""
    with mooncake.store(tmp_path) as store, members(tmp_path, store, (2, 2, 1)) as (writer, reader, other):
        exchange(store, writer, reader, 2)
        assert len({member(server)["namespace"] for server in (writer, reader, other)}) == 1
        before, seed = objects(store), LENGTHS.index(3 * BLOCK - 1)
        assert other.complete(text(seed, LENGTHS[seed]), max_tokens=ANSWER_TOKENS).cached_tokens == 0
        settle(store, len(before) + LAYERS // 2)
        assert all("/kstate-tp1-" in key for key in objects(store) if key not in before)
        assert troubles(other) == {}
