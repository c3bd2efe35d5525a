"""The class that vLLM loads: forwards every call to the side that this process is.

``--kv-transfer-config.kv_connector=KVShareConnector
--kv-transfer-config.kv_connector_module_path=kvshare_connector.connector``
"""

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvshare_connector import compat
from kvshare_connector.scheduler.glue import SchedulerSide
from kvshare_connector.stats import KVSharePromMetrics, KVShareStats
from kvshare_connector.store import installation, mooncake
from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.store.settings import settings_from
from kvshare_connector.wire import Report, Step
from kvshare_connector.worker.glue import WorkerSide
from kvshare_connector.worker.setting import Setting
from kvshare_layout import RankFacts, parse


def _log_like_the_engine() -> None:
    """Give our loggers the handlers and the level of vLLM's, which configures its own name only."""
    ours, theirs = logging.getLogger("kvshare_connector"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.getEffectiveLevel())


@dataclass
class KVShareHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Facts of one rank, as JSON."""

    facts: str


@dataclass
class KVShareMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the ranks must do in a step."""

    step: Step = field(default_factory=Step)


@dataclass
class KVShareWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What one or several ranks have to tell the scheduler."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both reports in one; neither is changed."""
        return KVShareWorkerMetadata(self.report.merge(other.report))


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _timed(method: _Method) -> _Method:
    """Count the time that a call takes from the thread of the engine that makes it."""

    @functools.wraps(method)
    def timed(self: "KVShareConnector", *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            side, process = (self._scheduler, "scheduler") if self._scheduler is not None else (self._worker, "worker")
            if side is not None:
                side.counters.blocked(process, method.__name__, time.perf_counter() - started)

    return timed  # type: ignore[return-value]


def _store_problem() -> str:
    """Why no store client can be made in this image, or an empty string."""
    problem = installation.library_problem()
    return f"MooncakeMissing: {problem}" if problem else ""


class KVShareConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Shares KV blocks between engines of different tensor-parallel sizes and cache layouts."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_the_engine()
        self._parsed = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._local_rank = 0
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._parsed, vllm_config, kv_cache_config, self._open_metadata_store, _store_problem()
            )
        else:
            parallel = vllm_config.parallel_config
            ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
            rank = parallel.rank % ranks
            self._local_rank = (parallel.data_parallel_rank_local or 0) * ranks + rank
            self._worker = WorkerSide(
                self._parsed.config,
                kv_cache_config,
                vllm_config.compilation_config.static_forward_context,
                self._open_store,
                rank=rank,
                tp_rank=rank % parallel.tensor_parallel_size,
                pp_rank=rank // parallel.tensor_parallel_size,
                problem=_store_problem(),
                tell_landed=compat.events_enabled(vllm_config),
                setting=Setting(
                    compat.platform_name(),
                    compat.indexer_keys(vllm_config),
                    compat.state_kernels(vllm_config),
                    vllm_config.model_config.get_total_num_hidden_layers(),
                ),
            )

    def _open_store(self) -> ObjectStore:
        return mooncake.MooncakeStore.open(settings_from(self._parsed.config, local_rank=self._local_rank))

    def _open_metadata_store(self) -> ObjectStore:
        return mooncake.MooncakeStore.open(settings_from(self._parsed.config).metadata_only())

    @property
    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("a call for the scheduler reached a rank")
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("a call for a rank reached the scheduler")
        return self._worker

    # Both processes.

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache; a lost save is a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The physical layout to ask for; none unless ``request_layout`` names one."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return parse(extra).config.request_layout or None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVShareStats:
        """Statistics from their serialised form."""
        return KVShareStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVSharePromMetrics:
        """The connector's metrics in vLLM's registry."""
        return KVSharePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> KVShareStats | None:
        """What was counted since the last call."""
        side = self._scheduler if self._scheduler is not None else self._worker_side
        data = side.statistics()
        stats = KVShareStats(data=data or {})
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Stop threads and close clients."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # Ranks.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The caches exist."""
        self._worker_side.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVShareHandshake | None:
        """Facts of this rank for the scheduler.

        None inside vLLM's MultiConnector, which would give them to every connector: others raise at what they do not
        know. There the facts come with the first step.
        """
        facts = self._worker_side.facts()
        if self._parsed.config.inside_multi_connector:
            return None
        return None if facts is None else KVShareHandshake(facts.to_json())

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        return metadata.step if isinstance(metadata, KVShareMetadata) else Step()

    @_timed
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads; all of them are asynchronous."""
        self._worker_side.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, no layer of a running request waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved whole, after the step."""

    @_timed
    def wait_for_save(self) -> None:
        """Start this step's saves behind the forward pass; their blocks are pinned by the scheduler.

        vLLM calls this in a ``finally``: after a forward pass that raised, the exception is still under way, and the
        blocks of the step were never computed.
        """
        self._worker_side.start_saves(self._step(), computed=sys.exc_info()[0] is None)

    @_timed
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that are over on this rank."""
        return compat.transfer_results(*self._worker_side.finished_loads())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same for callers of the older form, which know no failures by request: those loads stay open for ever."""
        finished, failed = self._worker_side.finished_loads()
        return None, (finished - failed) or None

    @_timed
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Cache blocks that were not proven loaded."""
        return self._worker_side.bad_block_ids()

    @_timed
    def build_connector_worker_meta(self) -> KVShareWorkerMetadata | None:
        """What this rank has to tell the scheduler."""
        report = self._worker_side.report()
        return None if report.empty else KVShareWorkerMetadata(report)

    # Scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The block pool, for pins."""
        self._scheduler_side.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Facts of all ranks, by pipeline and tensor-parallel rank."""
        facts = [RankFacts.from_json(m.facts) for m in metadata.values() if isinstance(m, KVShareHandshake)]
        self._scheduler_side.take_facts(facts)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """The same for callers without pipeline ranks."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): m for rank, m in metadata.items()})

    @_timed
    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        self._scheduler_side.new_request(request)

    @_timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the local ones; never waits for the store."""
        return self._scheduler_side.matched_tokens(request, num_computed_tokens)

    @_timed
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks have been allocated."""
        tables = blocks.get_block_ids() if num_external_tokens > 0 else ()
        self._scheduler_side.allocated(request, tables, num_external_tokens)

    @_timed
    def build_connector_meta(self, scheduler_output: Any) -> KVShareMetadata:
        """The step's work for the ranks."""
        return KVShareMetadata(self._scheduler_side.step(scheduler_output))

    @_timed
    def update_connector_output(self, connector_output: Any) -> None:
        """Results of the ranks."""
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, KVShareWorkerMetadata) else None
        finished = sorted(connector_output.finished_recving or ())
        failed = getattr(connector_output, "failed_recving", None) or ()
        invalid = frozenset(connector_output.invalid_block_ids or ())
        self._scheduler_side.output(report, finished, invalid, frozenset(failed))

    @_timed
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """A request has ended; its blocks may be freed at once, pins keep what is still read."""
        self._scheduler_side.finished(request, block_ids)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """The same for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_timed
    def take_events(self) -> Iterable[Any]:
        """Blocks that have arrived in the store, and such that have left it, when the engine publishes events."""
        return self._scheduler_side.events()

    @_timed
    def has_pending_push_work(self) -> bool:
        """Whether ranks still have something to report."""
        return self._scheduler_side.busy

    @_timed
    def reset_cache(self) -> bool:
        """Empty this engine's namespace."""
        return self._scheduler_side.reset()


# MultiConnector looks its children's statistics up by class name, in every process that has loaded this module.
with contextlib.suppress(ValueError):  # registered already
    KVConnectorFactory.register_connector(KVShareConnector.__name__, __name__, KVShareConnector.__name__)
