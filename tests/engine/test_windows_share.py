"""Real engines with windows of 128 tokens beside full attention, shared across TP sizes and layouts.

A writer of one TP size and a reader of another. What the reader answers with loaded blocks equals what it answers when
it computes the whole prompt itself; prompts end at and beside the boundaries of blocks and of the window.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed import mooncake
from testbed.engine import engine
from testbed.sharing import (
    BLOCK,
    ENVIRONMENT,
    connector_flags,
    counted,
    empty_cache,
    member,
    objects,
    settle,
    text,
    troubles,
)
from testbed.tiny_families import LAYERS, tiny_gemma, tiny_gpt_oss

WINDOW, HEADS, HEAD_BYTES = 128, 4, 2 * 32 * 4
#: At and beside every end of a block, up to three windows; and some of them, for `make test`.
LENGTHS = [n + d for n in range(BLOCK, 3 * WINDOW + 1, BLOCK) for d in (-1, 0, 1)]
SOME = [n + d for n in (BLOCK, WINDOW, WINDOW + BLOCK, 3 * WINDOW) for d in (-1, 0, 1)]
ANSWER_TOKENS = 16
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
#: Blocks of the window that a hit needs: those that the 127 tokens in front of the next one lie in.
TAIL = -(-(WINDOW - 1) // BLOCK)
#: Bytes of a block in the layers of one kind, which is every second layer.
BLOCK_BYTES = LAYERS // 2 * HEADS * HEAD_BYTES * BLOCK


@dataclass(frozen=True)
class Pair:
    """Two engines: TP size and layout of each, whether they run the any-layout attention of these tests, the model.

    And whether the reader drafts its answers from the text.
    """

    writer: tuple[int, str]
    reader: tuple[int, str]
    reference: bool = True
    family: Callable[[], Path] = tiny_gemma
    drafting: bool = False


def check(folder: Path, pair: Pair, lengths: Sequence[int]) -> None:
    """Write with one engine, read with the other, and compare answers, objects and bytes."""
    model, drafts = pair.family(), [f"--speculative-config={DRAFTS}"] if pair.drafting else []
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(folder))
        writer, reader = (
            stack.enter_context(
                engine(
                    folder, role, tp=tp, model=model, layout=layout, reference_attention=pair.reference,
                    environment=ENVIRONMENT,
                    arguments=[
                        *connector_flags(store, store_tp=HEADS, role=role, save_decode_cache=False),
                        *(drafts if role == "decode" else []),
                    ],
                )
            ).server
            for role, (tp, layout) in (("both", pair.writer), ("decode", pair.reader))
        )  # fmt: skip
        stored = written = read = 0
        for seed, length in enumerate(lengths):
            prompt, blocks = text(seed, length), (length - 1) // BLOCK
            # The salt keeps the prompt apart from itself: the reader computes all of it.
            expected = reader.complete(prompt, max_tokens=ANSWER_TOKENS, extra={"cache_salt": "alone"})
            assert expected.cached_tokens == 0
            writer.complete(prompt, max_tokens=1)
            stored += length // BLOCK * HEADS * 2
            written += length // BLOCK * BLOCK_BYTES * 2
            settle(store, stored)
            answer = reader.complete(prompt, max_tokens=ANSWER_TOKENS)
            assert (answer.cached_tokens, answer.token_ids) == (blocks * BLOCK, expected.token_ids), length
            read += (blocks + min(blocks, TAIL)) * BLOCK_BYTES
        assert counted(writer, "kvshare_saved_bytes_total", written) == written
        assert counted(reader, "kvshare_loaded_bytes_total", read) == read
        infos = [member(server) for server in (writer, reader)]
        assert [info["verdict"] for info in infos] == ["shared", "shared"]
        assert infos[0]["fingerprint"] == infos[1]["fingerprint"]
        assert {key.rsplit("/k", 1)[1].split("s")[0] for key in objects(store)} == {"full", "window128-"}
        assert [troubles(server) for server in (writer, reader)] == [{}, {}]


@pytest.mark.engine
def test_windows_that_tp_2_computed_are_not_computed_again_by_tp_1(tmp_path: Path) -> None:
    """Token-major writes, head-major reads."""
    check(tmp_path, Pair((2, "NHD"), (1, "HND")), SOME)


PAIRS = {
    "to a larger engine": Pair((1, "HND"), (2, "NHD")),
    "to a larger engine, layouts the other way": Pair((1, "NHD"), (2, "HND")),
    "vLLM's own kernel": Pair((2, "HND"), (1, "HND"), reference=False),
    "token-major to token-major": Pair((2, "NHD"), (1, "NHD")),
    "gpt-oss": Pair((2, "HND"), (1, "HND"), reference=False, family=tiny_gpt_oss),
    "gpt-oss to a larger engine": Pair((1, "HND"), (2, "HND"), reference=False, family=tiny_gpt_oss),
    "to an engine that drafts": Pair((2, "NHD"), (1, "HND"), drafting=True),
}


@pytest.mark.matrix
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_windows_are_shared_the_other_way_and_with_vllms_own_kernel(tmp_path: Path, pair: Pair) -> None:
    """TP 1 writes for TP 2, both layouts; vLLM's CPU attention, whose cells nobody but itself understands; gpt-oss.

    An engine that drafts from the text has the fingerprint of one that does not.
    """
    check(tmp_path, pair, LENGTHS)


@pytest.mark.matrix
def test_without_the_hybrid_manager_windows_are_full_attention(tmp_path: Path) -> None:
    """vLLM then keeps every block of a window, in one group: one kind, and the engine reads what it has stored."""
    prompt = text(1, 3 * WINDOW + 1)
    with (
        mooncake.store(tmp_path) as store,
        engine(
            tmp_path, "unified", model=tiny_gemma(), environment={**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"},
            arguments=[
                *connector_flags(store, store_tp=HEADS, save_decode_cache=False), "--disable-hybrid-kv-cache-manager",
            ],
        ) as running,
    ):  # fmt: skip
        first = running.server.complete(prompt, max_tokens=ANSWER_TOKENS)
        settle(store, 3 * WINDOW // BLOCK * HEADS)
        assert member(running.server)["verdict"] == "shared"
        assert all("/kfulls" in key for key in objects(store))
        empty_cache(running.server)
        again = running.server.complete(prompt, max_tokens=ANSWER_TOKENS)
        assert (again.cached_tokens, again.token_ids) == (3 * WINDOW, first.token_ids)
