"""An engine without a model: vLLM's own scheduler and block pool, our connector on every rank, an oracle for the bytes.

The forward pass writes bytes that follow from the tokens so far, so every byte of every cache and of every stored
object is known in advance. Before it writes, it checks what it was told to be computed already. Nothing here starts a
process or opens a connection.
"""

import copy
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvshare_connector import connector as product
from kvshare_connector.store.faults import Faults
from kvshare_connector.store.memory import MemoryStore
from kvshare_layout import keys
from kvshare_layout.stages import layer_partition
from physical import caches as physical_caches
from played_model import HASH_ALGORITHM, Backend, Shape, Text, WrongBytesError

#: Namespace of all engines in these tests.
POOL = "kvs1/p-test/g1"


@dataclass
class World:
    """What all engines of a test share.

    Attributes:
        config: vLLM's configuration.
        shape: of the model.
        store: the objects.
        texts: every block hash that a request had, with its text and block number.
        cuts: layers of every stage and number of shards, by kind; set by the engines that share.
    """

    config: Any
    shape: Shape
    store: MemoryStore = field(default_factory=MemoryStore)
    texts: dict[bytes, tuple[Text, int]] = field(default_factory=dict)
    cuts: dict[str, tuple[list[list[int]], int]] = field(default_factory=dict)

    def check_store(self) -> int:
        """Compare every stored object of a shared namespace with the bytes that its block must have.

        Returns:
            the number of objects compared.
        """
        compared = 0
        for key in self.store.keys:
            if key.endswith("/manifest") or "/i-" in key:
                continue
            _, block_hash, kind, shard, stage = keys.parse_object_key(key)
            text, number = self.texts[block_hash]
            data = self.store.contents.objects[key]
            layers, shards = self.cuts[kind]
            expected = b"".join(self.block(kind, text, number, layer, (shard, shards)) for layer in layers[stage])
            if data != expected:
                raise WrongBytesError(f"object {key} of block {number} is not what its tokens give")
            compared += 1
        return compared

    def block(self, kind: str, text: Text, number: int, layer: int, part: tuple[int, int]) -> bytes:
        """Bytes of one layer in an object of a kind; ``part`` is the shard and how many there are."""
        tokens, heads = self.shape.block_tokens, self.shape.kv_heads // part[1]
        mine = range(part[0] * heads, (part[0] + 1) * heads)
        return text.cells(number * tokens, (number + 1) * tokens, layer, mine, self.shape.cell).tobytes()

    def number(self, key: str) -> int:
        """Block number of an object in its text; -1 for other keys."""
        return -1 if "/k" not in key else self.texts[keys.parse_object_key(key)[1]][1]


def ours_in(connector: Any) -> product.KVShareConnector:
    """The connector under test, alone or as a child of MultiConnector."""
    children = [connector, *getattr(connector, "sub_connectors", ())]
    return next(child for child in children if isinstance(child, product.KVShareConnector))


class Rank:
    """One rank: its caches and its side of the connector."""

    def __init__(self, engine: "Engine", rank: int) -> None:
        shape, parallel = engine.world.shape, engine.config.parallel_config
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self.engine, self.rank, tp_rank = engine, rank, rank % tp
        bounds = layer_partition(shape.layers, pp)
        last = shape.draft_layers if rank // tp == pp - 1 else 0
        self.layers = range(bounds[rank // tp], bounds[rank // tp + 1] + last)
        ranges = min(tp, shape.kv_heads)
        per_rank = shape.kv_heads // ranges
        first = (tp_rank * ranges // tp) * per_rank
        self.heads = range(first, first + per_rank)
        mine = engine.cache_config(self.layers, per_rank)
        named = self.allocate(mine)
        config = copy.copy(engine.config)
        config.parallel_config = copy.copy(parallel)
        config.parallel_config.rank = rank
        config.compilation_config = SimpleNamespace(static_forward_context=self.attention_layers())
        self.whole = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, mine)
        self.connector = ours_in(self.whole)
        self.whole.register_kv_caches(named)

    def allocate(self, config: Any) -> dict[str, torch.Tensor]:
        """The caches by vLLM's names, as it allocates them.

        The groups share the memory, and a block of it belongs to one of them at a time.
        """
        shape, layout, blocks = self.engine.world.shape, self.engine.layout, self.engine.blocks
        groups = [[_layer(name) for name in group.layer_names] for group in config.kv_cache_groups]
        self.group_of = {layer: number for number, group in enumerate(groups) for layer in group}
        self.storage, views = physical_caches(
            layout, max(map(len, groups)), blocks, len(self.heads), shape.block_tokens, shape.cell
        )
        self.caches = {layer: views[place] for group in groups for place, layer in enumerate(group)}
        return {_name(layer): cache for layer, cache in self.caches.items()}

    def attention_layers(self) -> dict[str, Any]:
        """The attention layers by vLLM's names."""
        return {_name(i): SimpleNamespace(get_attn_backend=lambda: Backend) for i in self.layers}

    def execute(self, output: Any, work: Sequence["Work"]) -> KVConnectorOutput:
        """One step in the order of vLLM's model runner: check, write, loads, saves, results.

        vLLM calls the connector in a ``finally``, also after a forward pass that raised. With a draft model saves begin
        behind its forward pass, and the step's results have been collected before.
        """
        drafting = self.engine.config.speculative_config is not None
        self.whole.bind_connector_metadata(output.kv_connector_metadata)
        try:
            for item in work:
                self._forward(item)
        finally:
            self.whole.start_load_kv(None)
            if not drafting:
                self.whole.wait_for_save()
        results = self.whole.get_transfer_results(output.finished_req_ids)
        out = KVConnectorOutput(
            finished_recving=results.finished_recving,
            finished_sending=results.finished_sending,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.whole.get_block_ids_with_load_errors(),
            kv_connector_stats=self.whole.get_kv_connector_stats(),
            kv_connector_worker_meta=self.whole.build_connector_worker_meta(),
        )
        if drafting:
            self.whole.wait_for_save()
        self.whole.clear_connector_metadata()
        return out

    def _forward(self, item: "Work") -> None:
        shape = self.engine.world.shape
        for layer, cache in self.caches.items():
            expected = item.text.cells(0, item.end, layer, self.heads, shape.cell)
            ids = item.tables[self.group_of[layer]]
            table = torch.tensor(ids)
            whole = cache[table].transpose(0, 1).reshape(len(self.heads), -1, shape.cell).numpy()
            window = shape.window(layer)
            first = max(0, item.start - window + 1) if window else 0
            if not np.array_equal(whole[:, first : item.start], expected[:, first : item.start]):
                wrong = next(p for p in range(first, item.start) if not np.array_equal(whole[:, p], expected[:, p]))
                raise WrongBytesError(
                    f"rank {self.rank}, layer {layer}, request {item.request_id}: token {wrong} of {item.start} that "
                    "count as computed has other bytes in the cache"
                )
            for position in range(item.start, item.end):
                block, token = ids[position // shape.block_tokens], position % shape.block_tokens
                if block == 0:
                    raise WrongBytesError(f"request {item.request_id}: token {position} has no block in layer {layer}")
                rejected = 255 if position >= item.wrong_from else 0
                cache[block, :, token] = torch.from_numpy(expected[:, position] ^ rejected)


@dataclass(frozen=True)
class Work:
    """What a step computes for one request; from position ``wrong_from`` on for drafts that are rejected."""

    request_id: str
    text: Text
    tables: tuple[list[int], ...]
    start: int
    end: int
    sampled: list[int]
    wrong_from: int


def _name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def _layer(name: str) -> int:
    return int(name.split(".")[2])


def _groups(specs: dict[str, Any]) -> list[Any]:
    """Cache groups as vLLM makes them: the layers of every specification, dealt to groups of as many as the fewest."""
    layers: dict[Any, list[str]] = {}
    for name, spec in specs.items():
        layers.setdefault(spec, []).append(name)
    size = min(map(len, layers.values()))
    if max(map(len, layers.values())) < size * 1.5:
        size = max(map(len, layers.values()))
    return [
        KVCacheGroupSpec(names[first :: -(-len(names) // size)], spec)
        for spec, names in layers.items()
        for first in range(-(-len(names) // size))
    ]


class Engine:
    """A scheduler with the connector, its ranks, and the loop that drives them.

    Args:
        world: what engines share.
        name: of the engine.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        layout: physical layout of all caches.
        blocks: blocks of the cache.
        asynchronous: schedule one step ahead of the results.
        role: of the pool.
        kv_role: vLLM's.
        extra: more keys of the connector's configuration.
        faults: of all store clients of this engine.
        beside: connectors (entries of MultiConnector) before ours; MultiConnector is used when there are any.
        accepts: with speculative decoding, how many of a step's drafts are right.
        group_order: -1 for cache groups in the opposite order, as another layout or a draft model may give.
        change: changes vLLM's configuration before anything is made of it; its parts are the engine's own copies.
    """

    rank_class: type[Rank] = Rank

    def __init__(
        self,
        world: World,
        name: str = "a",
        *,
        tp: int = 1,
        pp: int = 1,
        layout: str = "LBNHC",
        blocks: int = 400,
        asynchronous: bool = False,
        role: str = "both",
        kv_role: str = "kv_both",
        extra: dict[str, Any] | None = None,
        faults: Faults | None = None,
        beside: Sequence[dict[str, Any]] = (),
        accepts: Callable[[], int] = lambda: 1,
        group_order: int = 1,
        change: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.world, self.name, self.layout, self.blocks = world, name, layout, blocks
        self.group_order = group_order
        self.faults = faults if faults is not None else Faults()
        self.clients: list[MemoryStore] = []
        config = copy.copy(world.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = tp, pp
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = asynchronous
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_role = kv_role
        config.kv_transfer_config.kv_connector_extra_config = {
            "master_server_address": "memory:1", "staging_bytes": 1 << 16, "cache_namespace": POOL, "role": role,
            "save_decode_cache": True, "store_tp_size": world.shape.kv_heads, "lookup_timeout_seconds": 50,
            **(extra or {}),
        }  # fmt: skip
        if beside:
            ours = config.kv_transfer_config
            ours.kv_connector_extra_config["inside_multi_connector"] = True
            entry = {
                "kv_connector": ours.kv_connector, "kv_connector_module_path": ours.kv_connector_module_path,
                "kv_role": kv_role, "kv_connector_extra_config": ours.kv_connector_extra_config,
            }  # fmt: skip
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
                kv_connector_extra_config={"connectors": [*beside, entry]},
            )  # fmt: skip
        change(config)
        self.config, self.asynchronous = config, asynchronous
        _OPENING.append(self)
        function = get_hash_fn_by_name(HASH_ALGORITHM)
        self._hasher = get_request_block_hasher(world.shape.block_tokens, function)
        heads = world.shape.kv_heads // min(tp, world.shape.kv_heads)
        layers = range(world.shape.layers + world.shape.draft_layers)
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=generate_scheduler_kv_cache_config([self.cache_config(layers, heads)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=world.shape.block_tokens,
            log_stats=True,
        )
        self.whole: Any = self.scheduler.connector
        self.connector = ours_in(self.whole)
        self.ranks = [self.rank_class(self, rank) for rank in range(tp * pp)]
        handshakes = {(r // tp, r % tp): self.ranks[r].whole.get_handshake_metadata() for r in range(tp * pp)}
        self.whole.set_xfer_handshake_metadata_pp_aware({at: m for at, m in handshakes.items() if m is not None})
        init_none_hash(function)
        self.work_tables = self.scheduler.kv_cache_manager.get_block_ids
        self._aggregator = KVOutputAggregator(len(self.ranks))
        self._accepts, self._computed = accepts, dict[str, int]()
        self._texts: dict[str, Text] = {}
        self._requests: dict[str, Any] = {}
        self._queue: deque[tuple[Any, list[Work]]] = deque()
        self._drafts: DraftTokenIds | None = None
        self.outputs: dict[str, list[int]] = {}
        self.external_tokens: dict[str, int] = {}
        self.metadata: list[Any] = []
        self._counters: Counter[str] = Counter()
        self.ready()

    def ready(self) -> "Engine":
        """Bring the engine to where requests find the store, if the facts of the ranks are there."""
        self._wait_for_clients()
        decision = self.side.decision
        if decision is not None and decision.verdict.state == "shared":
            for kind, stages in zip(decision.kinds, decision.stages, strict=True):
                cut = [list(stage.layers) for stage in stages]
                self.world.cuts[kind.name_in_keys] = (cut, kind.shards(decision.store_tp))
        return self

    def _wait_for_clients(self) -> None:
        """Wait until every thread has opened its client, so that a test's first request finds them."""
        probe = self.side._probe
        deadline = time.monotonic() + 30
        while probe is not None and not probe.answers_soon and time.monotonic() < deadline:
            time.sleep(0.001)

    @property
    def side(self) -> Any:
        """The scheduler side."""
        return self.connector._scheduler_side

    @property
    def pool(self) -> Any:
        """The block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def cache_config(self, layers: Iterable[int], heads: int) -> Any:
        """vLLM's cache configuration of a rank."""
        shape = self.world.shape
        size: dict[str, Any] = {
            "block_size": shape.block_tokens, "num_kv_heads": heads, "head_size": shape.cell // 2, "dtype": torch.uint8,
        }  # fmt: skip
        whole = range(shape.layers + shape.draft_layers)
        specs = {
            _name(i): SlidingWindowSpec(**size, sliding_window=window) if (window := shape.window(i)) else spec
            for spec in [FullAttentionSpec(**size)]
            for i in whole
        }
        groups = _groups(specs)[:: self.group_order]
        names = [_name(i) for i in layers]
        page = specs[_name(0)].page_size_bytes
        tensors = [
            KVCacheTensor(size=page * self.blocks, layers=[n], layer_stride=page, block_stride=page) for n in names
        ]
        mine = [KVCacheGroupSpec([n for n in g.layer_names if n in names], g.kv_cache_spec) for g in groups]
        return KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=tensors, kv_cache_groups=mine)

    def open_store(self) -> MemoryStore:
        """A client of the shared store for one part of this engine."""
        client = MemoryStore(contents=self.world.store.contents, faults=self.faults, assert_registered=True)
        self.clients.append(client)
        return client

    def add(
        self, request_id: str, prompt: Sequence[int], *, max_tokens: int = 1, flavour: int = 0, **more: Any
    ) -> None:
        """A request arrives; ``flavour`` as in ``Text``, ``more`` as in vLLM's ``Request``."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            **{
                "sampling_params": SamplingParams(max_tokens=max_tokens, ignore_eos=True), "pooling_params": None,
                "block_hasher": self._hasher, **more,
            },
        )  # fmt: skip
        self._texts[request_id], self._requests[request_id] = Text(prompt, flavour), request
        self.outputs[request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """The client of a request has gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """One turn of the engine's loop; False when the engine would go to sleep."""
        # Asked once a turn, as vLLM does: what the connector has left to do may end by the clock.
        busy, scheduled = self.scheduler.has_requests(), False
        if not busy and not self._queue:
            return False
        if busy:
            output = self.scheduler.schedule()
            scheduled = output.total_num_scheduled_tokens > 0
            self.metadata.append(_ours_of(output.kv_connector_metadata))
            self._queue.append((output, self._work_of(output)))
        if not (self.asynchronous and scheduled and len(self._queue) < 2):
            self._finish_step()
        if not scheduled:
            time.sleep(0.0005)
        return True

    def _work_of(self, output: Any) -> list[Work]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            # A scheduler that runs ahead counts drafts as right until it hears otherwise; the ranks know better.
            resumed = request_id in cached.resumed_req_ids
            starts[request_id] = start if resumed else min(start, self._computed[request_id])
        work: list[Work] = []
        for request_id, count in output.num_scheduled_tokens.items():
            request, text = self.scheduler.requests[request_id], self._texts[request_id]
            start, drafts = starts[request_id], len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            first_draft = start + count - drafts
            right = first_draft + min(drafts, self._accepts() if drafts else 0)
            sampled = [] if request.is_prefill_chunk or request.pooling_params else text.tokens(right + 1)[first_draft:]
            tables = tuple(list(table) for table in self.work_tables(request_id))
            work.append(Work(request_id, text, tables, start, start + count, sampled, right))
            self._computed[request_id] = right
        return work

    def _finish_step(self) -> None:
        output, work = self._queue.popleft()
        results = [
            ModelRunnerOutput(
                req_ids=[item.request_id for item in work],
                req_id_to_index={item.request_id: i for i, item in enumerate(work)},
                sampled_token_ids=[item.sampled for item in work],
                pooler_output=[self._pooled(item) for item in work],
                kv_connector_output=rank.execute(output, work),
            )
            for rank in self.ranks
        ]
        self._note_hashes(work)
        if self.config.speculative_config is not None and not self.asynchronous:
            drafting = [item.request_id for item in work if item.sampled]
            count = self.config.speculative_config.num_speculative_tokens
            self._drafts = DraftTokenIds(drafting, [[1] * count for _ in drafting])
        merged = self._aggregator.aggregate(results)
        for outputs in self.scheduler.update_from_output(output, merged).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                stats = outputs.scheduler_stats.kv_connector_stats
                self._counters.update(stats.get("KVShareConnector", stats).get("counters", {}))
            for item in outputs.outputs:
                self.outputs[item.request_id].extend(item.new_token_ids)
                if item.prefill_stats is not None:
                    self.external_tokens[item.request_id] = item.prefill_stats.num_external_cached_tokens

        self._note_hashes(work)
        if self._drafts is not None:
            self.scheduler.update_draft_token_ids(self._drafts)
            self._drafts = None

    def _pooled(self, item: Work) -> torch.Tensor | None:
        """The answer to a pooling request, once all of its prompt has been computed."""
        request = self._requests[item.request_id]
        done = request.pooling_params is not None and item.end >= request.num_prompt_tokens
        return torch.zeros(1) if done else None

    def _note_hashes(self, work: Sequence[Work]) -> None:
        for item in work:
            for number, block_hash in enumerate(self._requests[item.request_id].block_hashes):
                self.world.texts.setdefault(bytes(block_hash), (item.text, number))

    def run(self, *, seconds: float = 40.0) -> "Engine":
        """Step until the engine would sleep, and until the ranks' threads have nothing left to do."""
        deadline = time.monotonic() + seconds
        while self.step() or self.transfers_open:
            if time.monotonic() > deadline:
                raise TimeoutError(f"engine {self.name} does not come to rest: {self.describe()}")
        return self

    def step_until(self, reached: Callable[[], bool], *, seconds: float = 30.0) -> None:
        """Step until something is the case, also when the engine itself would sleep."""
        deadline = time.monotonic() + seconds
        while not reached():
            if not self.step():
                time.sleep(0.0005)
            if time.monotonic() > deadline:
                raise TimeoutError(f"engine {self.name} does not come there: {self.describe()}")

    def ask(self, prompt: Sequence[int], *, max_tokens: int = 1, **more: Any) -> int:
        """Run one request to its end; returns how many of its tokens came from the store, and checks its answer."""
        request_id = f"{self.name}-{len(self.outputs)}"
        self.add(request_id, prompt, max_tokens=max_tokens, **more)
        self.run()
        assert self.outputs[request_id] == self.answer(request_id)[:max_tokens]
        return self.external_tokens[request_id]

    def answer(self, request_id: str) -> list[int]:
        """What a request may be answered, as long as the model can write."""
        text, prompt = self._texts[request_id], self._requests[request_id].num_prompt_tokens
        return text.tokens(prompt + 64)[prompt:]

    @property
    def transfers_open(self) -> bool:
        """Whether a rank still moves bytes; what it has to say afterwards comes with the next request's steps."""
        movers = [rank.connector._worker_side._transfers for rank in self.ranks]
        return any(mover.open for mover in movers if mover is not None)

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds, without the null block."""
        return int(self.pool.num_gpu_blocks - self.pool.get_num_free_blocks() - 1)

    @property
    def loads_planned(self) -> int:
        """Loads that the ranks were told to start."""
        return sum(len(metadata.step.loads) for metadata in self.metadata)

    def count(self, name: str) -> float:
        """A counter, summed over all ranks, the scheduler and the labels that are not given."""
        for side in (self.side, *(rank.connector._worker_side for rank in self.ranks)):
            self._counters.update(side.counters.drain())
        return sum(value for key, value in self._counters.items() if key == name or key.startswith(name + ":"))

    def describe(self) -> str:
        """Where the engine stands, for messages."""
        waiting = {r.request_id: r.status.name for r in self.scheduler.requests.values()}
        return f"requests {waiting}, pinned jobs {self.side._pins.jobs}, loads {self.side._loads.in_flight}"

    def close(self) -> None:
        """Stop all threads."""
        self.faults.clear()
        self.connector.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()


def _ours_of(metadata: Any) -> Any:
    """The part of a step's metadata that is ours."""
    parts = [metadata, *getattr(metadata, "metadata", ())]
    return next(part for part in parts if isinstance(part, product.KVShareMetadata))


#: Engines, the newest last: its clients are the ones that are opened.
_OPENING: list[Engine] = []


def open_newest(*_: object) -> MemoryStore:
    """Stands in for ``MooncakeStore.open``: a client for the engine that was made last."""
    return _OPENING[-1].open_store()
