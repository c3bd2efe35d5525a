"""Costs: what a lookup takes of the scheduler's thread, and what memory a rank takes."""

import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.rank import WrongBytesError
from kvshare_connector.store import installation
from kvshare_connector.store import mooncake as edge
from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.settings import StoreSettings
from kvshare_connector.worker.arena import Arena
from kvshare_connector.worker.device import SCRATCH_BYTES
from kvshare_connector.worker.loading import GETTERS
from kvshare_layout import keys
from kvshare_layout.checks import STAGING_PARTS
from kvshare_layout.config import ConnectorConfig
from testbed import mooncake

PROMPTS = (1024, 16 * 1024, 128 * 1024)
BLOCK_TOKENS, SHARDS = 16, 4
REPEATS = 5
OBJECT_BYTES = (64 << 10, 256 << 10, 2 << 20, 4 << 20)
#: A scheduler comes back to a waiting request about this often.
STEP_SECONDS = 0.005


@dataclass(frozen=True)
class Lookup:
    """One prompt's lookup.

    Attributes:
        tokens: of the prompt, all of them stored.
        keys: that the store was asked for.
        calls: how often the scheduler asked until it had its answer.
        thread_microseconds: of the scheduler's thread, all calls together.
        longest_microseconds: the longest single call.
        answer_milliseconds: until the answer was there; the thread did other things meanwhile.
    """

    tokens: int
    keys: int
    calls: int
    thread_microseconds: float
    longest_microseconds: float
    answer_milliseconds: float


@dataclass(frozen=True)
class Memory:
    """A rank's memory.

    Attributes:
        arena_bytes: the staging arena, page-locked where an accelerator copies from it.
        parts: equal parts of the arena, two for each direction.
        objects: by the bytes of an object, how many a part takes.
        device_bytes: of an accelerator's memory, at most, while blocks are packed and unpacked.
    """

    arena_bytes: int
    parts: int
    objects: dict[int, int]
    device_bytes: int


def lookups() -> list[Lookup]:
    """Look prompts of several lengths up in a real Mooncake, from a scheduler side with a real vLLM request."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import played_engine
        from played_model import Shape as ModelShape
        from played_model import vllm_config
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(edge.MooncakeStore, "open", played_engine.open_newest),
        mock.patch.object(installation, "library_problem", return_value=""),
    ):
        shape = ModelShape(layers=1, kv_heads=SHARDS, block_tokens=BLOCK_TOKENS, cell=8)
        world = played_engine.World(vllm_config(Path(folder) / "model", shape), shape)
        engine = played_engine.Engine(world)
        try:
            return _lookups(engine, Path(folder))
        finally:
            engine.close()


def _lookups(engine: Any, folder: Path) -> list[Lookup]:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from kvshare_connector.scheduler.probe import Probe

    side, out = engine.side, list[Lookup]()
    with mooncake.store(folder, segment="1gb") as running:
        settings = StoreSettings(running.address)
        raw = installation.set_up(installation.library(), settings)
        store = MooncakeStore(settings, installation.library(), raw)
        memory = torch.zeros(4096, dtype=torch.uint8)
        store.register(memory.data_ptr(), memory.numel())
        side._probe.close()
        side._probe = Probe(lambda: store, overdue=60.0)
        while not side._probe.answers_soon:
            time.sleep(0.01)
        for tokens in PROMPTS:
            found: list[Lookup] = []
            for number in range(REPEATS):
                prompt = [(n * 31 + tokens + number) % 250 for n in range(tokens)]
                request = Request(
                    request_id=f"{tokens}-{number}", prompt_token_ids=prompt,
                    sampling_params=SamplingParams(max_tokens=1), pooling_params=None, block_hasher=engine._hasher,
                )  # fmt: skip
                names = [
                    keys.object_key(side.decision.namespace, h, id_.kind, id_.shard, id_.stage)
                    for h in request.block_hashes
                    for id_, _ in side.decision.objects
                ]
                if any(store.put_many(names, [[(memory.data_ptr(), 64)]] * len(names))):
                    raise WrongBytesError("an object was not stored")
                found.append(_lookup(side, request))
                store.remove_prefix(side.decision.namespace)
            out.append(sorted(found, key=lambda one: one.thread_microseconds)[len(found) // 2])
    return out


def _lookup(side: Any, request: Any) -> Lookup:
    side.counters.drain()
    started, spent = time.perf_counter(), []
    begun = time.perf_counter()
    side.new_request(request)
    spent.append(time.perf_counter() - begun)
    while True:
        begun = time.perf_counter()
        found, _ = side.matched_tokens(request, 0)
        spent.append(time.perf_counter() - begun)
        if found is not None:
            break
        time.sleep(STEP_SECONDS)
    waited = time.perf_counter() - started
    wanted = (request.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    if found != wanted:
        raise WrongBytesError(f"{found} of {wanted} stored tokens were found")
    asked = sum(n for name, n in side.counters.drain().items() if name.startswith("lookup_keys:"))
    side.finished(request, [])
    return Lookup(
        request.num_tokens, int(asked), len(spent), sum(spent) * 1e6, max(spent) * 1e6, waited * 1e3
    )  # fmt: skip


def memory() -> Memory:
    """What a rank allocates with the default configuration, from the classes that allocate it."""
    arena, objects = Arena(ConnectorConfig().staging_bytes), dict[int, int]()
    for size in OBJECT_BYTES:
        arena.cut(size)
        objects[size] = arena.send.slots
    return Memory(arena.buffer.numel(), STAGING_PARTS, objects, (1 + GETTERS) * SCRATCH_BYTES)
