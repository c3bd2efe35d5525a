"""End to end: prefill-heavy requests against real vLLM servers on CPU, with and without the connector."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.rank import WrongBytesError
from bench.rounds import Ratio, ratio
from kvshare_layout.config import ConnectorConfig, to_dotted_flags
from testbed import mooncake, places
from testbed.completions import Answer, Server
from testbed.engine import engine
from testbed.tiny_llama import TinyModel
from testbed.tiny_model import tiny_model

BLOCK, PROMPT_TOKENS, ANSWER_TOKENS, CONCURRENCY = 32, 1920, 2, 8
REQUESTS = 16
CACHED_TOKENS = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
#: Large enough that a prompt's computation outweighs the server's own work by far.
MODEL = TinyModel(layers=6, query_heads=8, kv_heads=4, head_size=64)
KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class EndToEnd:
    """Throughput in prompt tokens per second, and its ratios to the engine without connector in the same round.

    Attributes:
        plain: without connector, every prompt computed.
        cold: with connector, every prompt computed and stored.
        cached: with connector, another engine reads what was stored.
        cold_to_plain: what storing costs.
        cached_to_plain: what reading gains.
    """

    plain: float
    cold: float
    cached: float
    cold_to_plain: Ratio
    cached_to_plain: Ratio


def _prompt(seed: int) -> list[int]:
    """A prompt that shares no block with that of another seed."""
    rest = ((i * 7 + i // 13 + i * seed % 11) % 200 + 20 for i in range(2, PROMPT_TOKENS))
    return [seed % 200 + 20, seed // 200 + 20, *rest]


def _flags(store: mooncake.Store) -> list[str]:
    """Arguments that make an engine a member, as the operator would inject them."""
    config = ConnectorConfig(
        store_tp_size=1, cache_namespace="kvs1/p-bench/g1", master_server_address=store.address,
        block_size_tokens=BLOCK, hash_algorithm="sha256_cbor",
    )  # fmt: skip
    return [*to_dotted_flags(config, kv_role="kv_both"), "--prefix-caching-hash-algo=sha256_cbor"]


def _ask(server: Server, prompts: Sequence[Sequence[int]]) -> tuple[float, list[Answer]]:
    """Seconds for all prompts at the concurrency, and their answers."""
    started = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=ANSWER_TOKENS), prompts))
    return time.perf_counter() - started, answers


def _settled(server: Server) -> None:
    """Wait until what was computed has been stored."""
    before, deadline = -1.0, time.monotonic() + 60
    while (now := server.metric("kvshare_saved_bytes_total")) != before and time.monotonic() < deadline:
        before = now
        time.sleep(0.5)


def run(rounds: int = 3) -> EndToEnd:
    """Three engines that take turns.

    Raises:
        WrongBytesError: an answer differs from that of the engine without connector, or fewer tokens were cached.
    """
    took: dict[str, list[float]] = {"plain": [], "cold": [], "cached": []}
    model = tiny_model(MODEL)
    with tempfile.TemporaryDirectory() as name, mooncake.store(Path(name), segment="4gb") as store:
        folder = Path(name)
        size = [f"--kv-cache-memory-bytes={KV_CACHE_BYTES}"]
        flags = [*size, *_flags(store)]
        environment = {"PYTHONPATH": str(places.REPOSITORY / "connector")}
        with (
            engine(folder, "plain", model=model, arguments=size) as plain,
            engine(folder, "writer", model=model, arguments=flags, environment=environment) as writer,
            engine(folder, "reader", model=model, arguments=flags, environment=environment) as reader,
        ):
            for number in range(rounds + 1):
                prompts = [_prompt(number * REQUESTS + n + 1) for n in range(REQUESTS)]
                seconds: dict[str, float] = {}
                seconds["plain"], expected = _ask(plain.server, prompts)
                seconds["cold"], answers = _ask(writer.server, prompts)
                _check(answers, expected, 0)
                _settled(writer.server)
                seconds["cached"], answers = _ask(reader.server, prompts)
                _check(answers, expected, CACHED_TOKENS)
                if number:  # the first round warms up
                    for key, value in seconds.items():
                        took[key].append(value)
    rate = {key: REQUESTS * PROMPT_TOKENS / statistics.median(values) for key, values in took.items()}
    return EndToEnd(
        rate["plain"], rate["cold"], rate["cached"],
        ratio(took["plain"], took["cold"]), ratio(took["plain"], took["cached"]),
    )  # fmt: skip


def _check(answers: Sequence[Answer], expected: Sequence[Answer], cached: int) -> None:
    for number, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        if answer.token_ids != want.token_ids:
            raise WrongBytesError(f"request {number}: {answer.token_ids} given, {want.token_ids} without the connector")
        if answer.cached_tokens != cached:
            raise WrongBytesError(f"request {number}: {answer.cached_tokens} tokens were cached, {cached} expected")
