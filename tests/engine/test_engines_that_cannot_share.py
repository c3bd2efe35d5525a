"""Real engines whose caches have no common form: they serve, say why, and meet nobody."""

import time
from pathlib import Path

import pytest

from testbed import mooncake
from testbed.engine import engine
from testbed.sharing import BLOCK, ENVIRONMENT, connector_flags, member, objects, settle, text
from testbed.tiny_families import tiny_deepseek

PROMPT = text(1, 400)
DEVELOPER = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.matrix
def test_an_encoding_that_nobody_has_declared_keeps_to_itself(tmp_path: Path) -> None:
    """What a cell holds is unknown: isolated with the reason, and the engine still reads what it has stored itself."""
    with (
        mooncake.store(tmp_path) as store,
        engine(
            tmp_path, "undeclared", tp=2, layout="NHD", reference_attention=True,
            arguments=connector_flags(store, store_tp=4, save_decode_cache=False),
            environment={**DEVELOPER, "REFERENCE_ATTENTION": "undeclared"},
        ) as running,
    ):  # fmt: skip
        first = running.server.complete(PROMPT, max_tokens=16)
        info = member(running.server)
        assert (info["verdict"], info["reason"]) == ("isolated", "EncodingNotSliceable")
        blocks, ranks = len(PROMPT) // BLOCK, 2
        settle(store, blocks * ranks)
        assert all("/i-" in key for key in objects(store))
        deadline = time.monotonic() + 20
        while not running.server.reset_cache():
            assert time.monotonic() < deadline, "the engine's own cache could not be emptied"
            time.sleep(0.2)
        again = running.server.complete(PROMPT, max_tokens=16)
        assert (again.token_ids, again.cached_tokens) == (first.token_ids, blocks * BLOCK)


@pytest.mark.engine
def test_a_latent_head_on_a_processor_without_matrix_tiles_is_served_without_caching(tmp_path: Path) -> None:
    """vLLM turns prefix caching off for MLA on such processors: disabled with that reason, and served all the same."""
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has matrix tiles, vLLM caches prefixes of MLA models on it")
    with (
        mooncake.store(tmp_path) as store,
        engine(
            tmp_path, "deepseek", model=tiny_deepseek(), block_tokens=16, environment=ENVIRONMENT,
            arguments=connector_flags(store, store_tp=1, block_tokens=16),
        ) as running,
    ):  # fmt: skip
        first = running.server.complete(PROMPT, max_tokens=16)
        assert (member(running.server)["verdict"], member(running.server)["reason"]) == ("disabled", "PrefixCachingOff")
        assert running.server.complete(PROMPT, max_tokens=16).token_ids == first.token_ids
        assert objects(store) == []
