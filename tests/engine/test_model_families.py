"""Real engines with models of other shapes: fewer KV heads than ranks, one head.

A writer of one TP size and a reader of another. What the reader answers with loaded blocks equals what it answers when
it computes the whole prompt itself, and the writer's bytes are the model's unique KV bytes, however many ranks hold a
copy of a head.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed import mooncake
from testbed.engine import engine
from testbed.sharing import PATIENT, connector_flags, counted, member, objects, settle, text, troubles
from testbed.tiny_llama import TinyModel
from testbed.tiny_model import tiny_model

PROMPT = text(1, 500)
ANSWER_TOKENS = 24
FLOAT32 = 4


@dataclass(frozen=True)
class Family:
    """A model and the two engines that share its cache.

    Attributes:
        model: makes the model.
        writer_tp: TP size that computes the prompt.
        reader_tp: TP size that takes it from the store.
        store_tp: S.
        block_tokens: block size.
        token_bytes: KV bytes of a token over all layers, every head once.
    """

    model: Callable[[], Path]
    writer_tp: int
    reader_tp: int
    store_tp: int
    block_tokens: int
    token_bytes: int


def llama_bytes(model: TinyModel) -> int:
    """KV bytes of a token: K and V of every head in every layer."""
    return model.layers * model.kv_heads * 2 * model.head_size * FLOAT32


GQA, MQA = TinyModel(kv_heads=2), TinyModel(kv_heads=1)
FAMILIES = {
    "gqa": Family(lambda: tiny_model(GQA), 4, 1, 2, 32, llama_bytes(GQA)),
    "mqa": Family(lambda: tiny_model(MQA), 2, 1, 1, 32, llama_bytes(MQA)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*FAMILIES])
def test_a_smaller_engine_takes_what_replicas_have_written_in_turn(tmp_path: Path, name: str) -> None:
    """B3 and E3: 2 KV heads at TP 4, one head at TP 2: unique bytes are written, and all of them read."""
    family = FAMILIES[name]
    model = family.model()
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(tmp_path))
        writer, reader = (
            stack.enter_context(
                engine(
                    tmp_path, f"{role}-{tp}", tp=tp, model=model, block_tokens=family.block_tokens,
                    reference_attention=True, environment=PATIENT,
                    layout=layout,
                    arguments=connector_flags(
                        store, store_tp=family.store_tp, role=role, block_tokens=family.block_tokens,
                        save_decode_cache=False,
                    ),
                )
            ).server
            for role, tp, layout in (("both", family.writer_tp, "NHD"), ("decode", family.reader_tp, "HND"))
        )  # fmt: skip
        # The salt keeps the prompt apart from itself: the reader computes all of it.
        expected = reader.complete(PROMPT, max_tokens=ANSWER_TOKENS, extra={"cache_salt": "alone"})
        assert (expected.cached_tokens, objects(store)) == (0, [])

        blocks = len(PROMPT) // family.block_tokens
        writer.complete(PROMPT, max_tokens=1)
        settle(store, blocks * family.store_tp)
        unique = blocks * family.block_tokens * family.token_bytes
        assert counted(writer, "kvshare_saved_bytes_total", unique) == unique

        answer = reader.complete(PROMPT, max_tokens=ANSWER_TOKENS)
        assert (answer.cached_tokens, answer.token_ids) == (blocks * family.block_tokens, expected.token_ids)
        assert counted(reader, "kvshare_loaded_bytes_total", unique) == unique
        assert len(objects(store)) == blocks * family.store_tp
        assert [member(server)["verdict"] for server in (writer, reader)] == ["shared", "shared"]
        assert [troubles(server) for server in (writer, reader)] == [{}, {}]
