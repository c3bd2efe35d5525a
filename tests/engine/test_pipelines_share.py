"""Real engines: pipeline 2 with one rank a stage, and TP 2 with one stage, share on common stages, both ways."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from testbed import mooncake
from testbed.completions import Server
from testbed.engine import engine
from testbed.sharing import BLOCK, ENVIRONMENT, connector_flags, member, objects, settle, text, troubles

pytestmark = pytest.mark.engine

STORE_TP, STAGES, ANSWER_TOKENS = 2, 2, 24


@dataclass
class Sharing:
    """The running engines."""

    store: mooncake.Store
    pipeline: Server
    flat: Server


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    """Both engines on one store, in different layouts."""
    folder = tmp_path_factory.mktemp("pipelines")
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(folder))
        flags = connector_flags(store, store_tp=STORE_TP, pipeline_sizes=(1, 2), save_decode_cache=False)
        pipeline, flat = (
            stack.enter_context(
                engine(
                    folder, name, tp=tp, pp=pp, layout=layout, reference_attention=True, arguments=flags,
                    environment=ENVIRONMENT,
                )
            ).server
            for name, tp, pp, layout in (("pipeline", 1, 2, "NHD"), ("flat", 2, 1, "HND"))
        )  # fmt: skip
        yield Sharing(store, pipeline, flat)


def read_by(store: mooncake.Store, writer: Server, reader: Server, prompt: list[int]) -> None:
    """The writer computes a prompt and the reader takes it, both with the answer that they compute without sharing."""
    blocks, before = len(prompt) // BLOCK, len(objects(store))
    for number, server in enumerate((writer, reader), start=1):
        # The salt keeps the prompt apart from everybody's: all of it is computed.
        alone = server.complete(prompt, max_tokens=ANSWER_TOKENS, extra={"cache_salt": f"alone {number}"})
        settle(store, before + number * blocks * STORE_TP * STAGES)
        shared = server.complete(prompt, max_tokens=ANSWER_TOKENS)
        if server is writer:
            before += blocks * STORE_TP * STAGES
            settle(store, before + blocks * STORE_TP * STAGES)
        expected = 0 if server is writer else blocks * BLOCK
        assert (alone.cached_tokens, shared.cached_tokens) == (0, expected)
        assert shared.token_ids == alone.token_ids
    for server in (writer, reader):
        assert member(server)["verdict"] == "shared"
        assert troubles(server) == {}


def test_tp_2_takes_what_two_stages_have_written(sharing: Sharing) -> None:
    """Every block is S x P objects; the reader's ranks take their heads of both stages."""
    read_by(sharing.store, sharing.pipeline, sharing.flat, text(1, 500))


def test_two_stages_take_what_tp_2_has_written(sharing: Sharing) -> None:
    """And back: each stage takes its layers of what two ranks have written."""
    read_by(sharing.store, sharing.flat, sharing.pipeline, text(2, 700))


def test_both_have_one_namespace(sharing: Sharing) -> None:
    """F1: neither stages nor heads of an engine enter the fingerprint."""
    assert member(sharing.pipeline)["namespace"] == member(sharing.flat)["namespace"]
