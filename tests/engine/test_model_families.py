"""Real engines with models of other shapes: fewer KV heads than ranks, one head; and with vLLM's own CPU attention.

A writer of one TP size and a reader of another. What the reader answers with loaded blocks equals what it answers when
it computes the whole prompt itself, and the writer's bytes are the model's unique KV bytes, however many ranks hold a
copy of a head.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.settings import StoreSettings
from testbed import latent_prefixes, mooncake
from testbed.completions import Answer, Server
from testbed.engine import engine
from testbed.sharing import ENVIRONMENT, connector_flags, counted, empty_cache, member, objects, settle, text, troubles
from testbed.tiny_families import tiny_deepseek
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
        layouts: of writer and reader; None leaves it to vLLM's own CPU attention, whose cells are packed for the
            processor: head ranges can be moved, tokens cannot.
    """

    model: Callable[[], Path]
    writer_tp: int
    reader_tp: int
    store_tp: int
    block_tokens: int
    token_bytes: int
    layouts: tuple[str, str] | None = ("NHD", "HND")


def llama_bytes(model: TinyModel) -> int:
    """KV bytes of a token: K and V of every head in every layer."""
    return model.layers * model.kv_heads * 2 * model.head_size * FLOAT32


MHA, GQA, MQA = TinyModel(), TinyModel(kv_heads=2), TinyModel(kv_heads=1)
FAMILIES = {
    "gqa": Family(lambda: tiny_model(GQA), 4, 1, 2, 32, llama_bytes(GQA)),
    "mqa": Family(lambda: tiny_model(MQA), 2, 1, 1, 32, llama_bytes(MQA)),
    "cpu-attention": Family(lambda: tiny_model(MHA), 2, 1, 2, 32, llama_bytes(MHA), layouts=None),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix if name == "mqa" else pytest.mark.engine) for name in FAMILIES],
)
def test_a_smaller_engine_takes_what_replicas_have_written_in_turn(tmp_path: Path, name: str) -> None:
    """B3 and E3: 2 KV heads at TP 4, one head at TP 2: unique bytes are written, and all of them read.

    The third runs vLLM's own attention for CPUs, without the test bed's.
    """
    family = FAMILIES[name]
    model = family.model()
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(tmp_path))
        writer, reader = (
            stack.enter_context(
                engine(
                    tmp_path, f"{role}-{tp}", tp=tp, model=model, block_tokens=family.block_tokens,
                    reference_attention=family.layouts is not None, environment=ENVIRONMENT,
                    layout=family.layouts and family.layouts[number],
                    arguments=connector_flags(
                        store, store_tp=family.store_tp, role=role, block_tokens=family.block_tokens,
                        save_decode_cache=False,
                    ),
                )
            ).server
            for number, (role, tp) in enumerate((("both", family.writer_tp), ("decode", family.reader_tp)))
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


@pytest.mark.matrix
def test_latent_attention_is_shared_between_sizes(tmp_path: Path) -> None:
    """MLA: one latent head, which both ranks of TP 2 hold and write in turn, and every byte of it once.

    The prompt has one token more than whole blocks: all but that one come from the store. vLLM's CPU kernels round
    otherwise in a decoding step than for a whole prompt, and with two ranks than with one. So each size answers from
    loaded blocks what it answers from its own cache, and across sizes the first layer, which no other has touched, is
    compared.
    """
    blocks, block_tokens, environment = (
        20,
        16,
        {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", latent_prefixes.SWITCH: "1"},
    )
    cached, model = blocks * block_tokens, tiny_deepseek()
    prompt = text(1, cached + 1)
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(tmp_path))
        flags = connector_flags(store, store_tp=1, block_tokens=block_tokens, save_decode_cache=False)
        large, small, other = (
            stack.enter_context(
                engine(
                    tmp_path, name, tp=tp, model=model, block_tokens=block_tokens, environment=environment,
                    arguments=flags,
                )
            ).server
            for name, tp in (("large", 2), ("small", 1), ("other", 1))
        )  # fmt: skip

        def ask(server: Server, salt: str) -> Answer:
            return server.complete(prompt, max_tokens=ANSWER_TOKENS, extra={"cache_salt": salt})

        assert [ask(small, "one").cached_tokens, (local := ask(small, "one")).cached_tokens] == [0, cached]
        settle(store, blocks)
        ones = objects(store)
        shared = ask(other, "one")
        assert (shared.cached_tokens, shared.token_ids) == (cached, local.token_ids)

        assert [ask(large, "two").cached_tokens, (local := ask(large, "two")).cached_tokens] == [0, cached]
        settle(store, 2 * blocks)
        empty_cache(large)
        assert ((again := ask(large, "two")).cached_tokens, again.token_ids) == (cached, local.token_ids)
        assert ask(small, "two").cached_tokens == cached
        loaded = counted(other, "kvshare_loaded_bytes_total", 1)
        assert counted(large, "kvshare_saved_bytes_total", loaded) == loaded > 0
        # Each of the two ranks loads the head.
        for server, ranks in ((small, 1), (large, 2)):
            assert counted(server, "kvshare_loaded_bytes_total", loaded * ranks) == loaded * ranks
        twos = [key for key in objects(store) if key not in ones]
        assert _first_layers(store, ones) == _first_layers(store, twos)
        servers = (large, small, other)
        assert len({(member(server)["verdict"], member(server)["namespace"]) for server in servers}) == 1
        assert [troubles(server) for server in servers] == [{}, {}, {}]


def _first_layers(store: mooncake.Store, keys: Sequence[str]) -> set[bytes]:
    """The first layer of each object: one head, 16 tokens, 512 elements of latent and 64 of position."""
    client = MooncakeStore.open(StoreSettings(store.address))
    try:
        layers = {(client.get_bytes(key) or b"")[: 16 * (512 + 64) * FLOAT32] for key in keys}
    finally:
        client.close()
    assert len(layers) == len(keys)
    return layers
