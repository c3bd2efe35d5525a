"""Engines that share: what the operator would inject, prompts, and what the store holds afterwards."""

import re
import time
from collections.abc import Sequence

from kvshare_layout.config import ConnectorConfig, kv_role_of, to_dotted_flags
from testbed import mooncake, places
from testbed.completions import Server

BLOCK = 32
SOURCE = places.REPOSITORY / "connector"
ENVIRONMENT = {"PYTHONPATH": str(SOURCE)}
"""With it an engine finds the checkout's connector."""


def text(seed: int, length: int) -> list[int]:
    """A prompt of bytes that no other seed shares a block with."""
    return [(i * 7 + i // 13 + seed * 31 + i * seed % 11) % 200 + 20 for i in range(length)]


def connector_flags(
    store: mooncake.Store,
    *,
    store_tp: int,
    role: str = "both",
    block_tokens: int = BLOCK,
    pipeline_sizes: Sequence[int] = (),
    save_decode_cache: bool = True,
    pool: str = "engines",
) -> list[str]:
    """Arguments of `vllm serve` that make an engine a member, as the operator would inject them.

    Args:
        store: where the pool keeps its blocks.
        store_tp: S.
        role: `prefill`, `decode` or `both`.
        block_tokens: block size of the pool.
        pipeline_sizes: pipeline sizes of the pool; the engine's own only when empty.
        save_decode_cache: whether decoded blocks are saved.
        pool: name of the pool, part of all its keys.
    """
    config = ConnectorConfig(
        store_tp_size=store_tp, role=role, save_decode_cache=save_decode_cache, cache_namespace=f"kvs1/p-{pool}/g1",
        master_server_address=store.address, block_size_tokens=block_tokens, hash_algorithm="sha256_cbor",
        staging_bytes=32 << 20, pipeline_parallel_sizes=tuple(pipeline_sizes),
    )  # fmt: skip
    return [*to_dotted_flags(config, kv_role=kv_role_of(role)), "--prefix-caching-hash-algo=sha256_cbor"]


def member(server: Server) -> dict[str, str]:
    """The labels of what an engine says about itself."""
    info = next(name for name, value in server.metrics().items() if name.startswith("kvshare_member_info") and value)
    return dict(re.findall(r'(\w+)="([^"]*)"', info))


def objects(store: mooncake.Store) -> list[str]:
    """Keys of cache objects in the store, shared and isolated ones."""
    return [key for key in store.master.keys() if re.search(r"/k[\w-]+s\d+p\d+$", key)]  # noqa: SIM118


def settle(store: mooncake.Store, count: int, *, seconds: float = 60) -> None:
    """Wait until the store holds exactly `count` objects; saving is asynchronous.

    Raises:
        AssertionError: fewer when the time is over, or more at any time.
    """
    deadline = time.monotonic() + seconds
    while (found := len(objects(store))) != count:
        if found > count or time.monotonic() > deadline:
            raise AssertionError(f"{found} objects stored, {count} expected")
        time.sleep(0.1)


def counted(server: Server, metric: str, value: float, *, seconds: float = 60) -> float:
    """A metric once it has reached `value`, or as it is when the time is over; an engine reports with its steps."""
    deadline = time.monotonic() + seconds
    while (found := server.metric(metric)) < value and time.monotonic() < deadline:
        server.complete(text(99, 5), max_tokens=2)
        time.sleep(0.2)
    return found


def empty_cache(server: Server, *, external: bool = False, seconds: float = 60) -> None:
    """Empty an engine's own cache, and with `external` the shared one, as soon as nothing in it is still being read.

    Raises:
        AssertionError: it could not be emptied in time.
    """
    deadline = time.monotonic() + seconds
    while not server.reset_cache(external=external):
        assert time.monotonic() < deadline, f"the engine's own cache could not be emptied for {seconds} s"
        time.sleep(0.2)


def troubles(server: Server) -> dict[str, float]:
    """Everything that the connector counts only when something is wrong."""
    names = ("kvshare_failed_", "kvshare_lookup_timeouts", "kvshare_lookups_skipped", "kvshare_dropped")
    return {
        sample: value
        for sample, value in server.metrics().items()
        if value and sample.startswith(names) and "_created" not in sample
    }
