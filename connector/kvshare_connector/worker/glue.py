"""Glue of a rank: the engine's worker calls on one side, facts, plan and transfers on the other; no rule of its own."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvshare_connector.counters import Counters
from kvshare_connector.lines import Summary
from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.wire import Report, Step
from kvshare_connector.worker import facts as rank_facts
from kvshare_connector.worker.arena import Arena
from kvshare_connector.worker.client import StoreClient
from kvshare_connector.worker.completions import Completions
from kvshare_connector.worker.device import Lane
from kvshare_connector.worker.plan import direct_limit, make_plan
from kvshare_connector.worker.rank import Rank, Underway
from kvshare_connector.worker.setting import Setting
from kvshare_connector.worker.transfer import Transfers
from kvshare_layout import Decision, RankFacts, held_objects
from kvshare_layout.checks import layers_of
from kvshare_layout.config import ConnectorConfig
from kvshare_layout.objects import seal_bytes

logger = logging.getLogger(__name__)

#: Seconds for which a rank may keep figures that nobody waits for.
COUNT_SECONDS = 1.0
#: Seconds that start-up waits to see whether the rank's memory can be registered.
REGISTER_SECONDS = 30.0


class WorkerSide:
    """One rank.

    Args:
        config: the connector's configuration.
        kv_cache_config: the engine's cache configuration.
        layers: the engine's attention layers by name.
        open_store: opens a store client.
        rank: rank inside the engine.
        tp_rank: tensor-parallel rank.
        pp_rank: pipeline rank.
        problem: what is known to keep this rank from caching, ``Reason: sentence``.
        tell_landed: whether the scheduler wants to know which saves have landed.
        setting: what the caches of indexers and recurrent states depend on.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        kv_cache_config: Any,
        layers: Mapping[str, Any],
        open_store: Callable[[], ObjectStore],
        *,
        rank: int,
        tp_rank: int,
        pp_rank: int,
        problem: str,
        tell_landed: bool = False,
        setting: Setting | None = None,
    ) -> None:
        self._config, self._kv_cache_config, self._layers, self._open_store = (
            config,
            kv_cache_config,
            layers,
            open_store,
        )
        self._rank, self._tp_rank, self._pp_rank, self._problem = rank, tp_rank, pp_rank, problem
        self._setting = setting
        self._completions = Completions(tell_landed=tell_landed)
        self._summary = Summary(f"rank {rank}")
        self.counters = Counters(f"rank {rank}", heard=self._summary.counted)
        self._counted_at = 0.0
        self._facts: RankFacts | None = None
        self._views: tuple[rank_facts.LayerView, ...] = ()
        self._arena: Arena | None = None
        self._client: StoreClient | None = None
        self._transfers: Transfers | None = None
        self._bad_block_ids: set[int] = set()
        self._facts_sent = False
        self._epoch = 0

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The caches exist: gather facts, allocate the arena, open the store."""
        try:
            self._facts, self._views = rank_facts.gather(
                kv_caches, self._kv_cache_config, self._layers,
                rank=self._rank, tp_rank=self._tp_rank, pp_rank=self._pp_rank, problem=self._problem,
                setting=self._setting,
            )  # fmt: skip
        except Exception as error:
            logger.exception(
                "the caches of rank %d cannot be understood, nothing is cached: please report it", self._rank
            )
            problem = f"CacheShapeUnknown: {type(error).__name__}: {error}"
            self._facts = RankFacts(self._rank, self._tp_rank, self._pp_rank, (), (problem,))
        if self._facts.problems or not self._views:
            return
        self._compare_layouts(self._facts)
        device = self._views[0].cache.device
        self._arena = Arena(self._config.staging_bytes, pinned=device.type == "cuda")
        self.counters.set("arena_bytes", self._config.staging_bytes)
        logger.info("staging arena of rank %d: %d MiB", self._rank, self._config.staging_bytes >> 20)
        buffers = [(self._arena.buffer.data_ptr(), self._arena.buffer.numel()), *_storages(self._views)]
        self._client = StoreClient(self._open_store, [(address, size) for address, size in buffers if size])

    def _compare_layouts(self, facts: RankFacts) -> None:
        """Say when the caches have another layout than the one asked for; what the tensors say is what counts."""
        found = facts.layouts
        if self._config.request_layout and found != (self._config.request_layout,):
            logger.warning(
                "layout %s was requested, rank %d has %s in its tensors, which is used: the attention backend decides",
                self._config.request_layout, self._rank, ", ".join(found),
            )  # fmt: skip

    def facts(self) -> RankFacts | None:
        """The rank's facts, once the caches exist.

        Raises:
            StoreSetupError: the rank's memory could not be registered with the store.
        """
        if self._client is not None:
            self._client.check(REGISTER_SECONDS)
        return self._facts

    def start_loads(self, step: Step) -> None:
        """Carry out everything in a step that need not wait for the forward pass."""
        if step.decision is not None:
            try:
                self._set_up(step.decision)
            except Exception:
                logger.exception(
                    "rank %d cannot transfer blocks, its loads fail and are computed: please report it", self._rank
                )
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            if self._transfers is not None:
                self._transfers.new_epoch(step.epoch)
            else:
                self._completions.settled(step.epoch)
        for plan in step.loads:
            if self._transfers is not None:
                self._transfers.load(plan)
            elif self._completions.load_started(plan.generation, plan.request_id):
                self._completions.load_over(plan, 0 if self._holds_something else plan.length, ())

    def start_saves(self, step: Step, *, computed: bool = True) -> None:
        """Start the step's saves; the forward pass, if there was one, has been given to the device.

        Args:
            step: the step.
            computed: False when the forward pass raised: its blocks hold whatever was there before, nothing is saved.
        """
        for job in step.saves:
            if self._transfers is not None and computed:
                self._transfers.save(job)
            else:
                self._completions.save_started(job.job_id)
                if self._holds_something:
                    self._completions.save_failed(job.block_hashes)
                self._completions.save_released(job.job_id)
                self._completions.save_landed(job.job_id)

    @property
    def _holds_something(self) -> bool:
        """False for a rank without caches: it has nothing to load or to save, and nothing that could be missing."""
        return self._facts is None or bool(self._facts.layers)

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose load is over on this rank, each once, and those of them whose load failed as a whole.

        The bad blocks of the others come with ``bad_block_ids``.
        """
        finished, failed, bad = self._completions.drain_loads()
        self._bad_block_ids |= bad
        return finished, failed

    def bad_block_ids(self) -> set[int]:
        """Cache blocks that were not proven loaded, each once."""
        taken, self._bad_block_ids = self._bad_block_ids, set()
        return taken

    def report(self) -> Report:
        """What this rank has to tell the scheduler."""
        rest = self._completions.drain_rest()
        facts: dict[int, str] = {}
        if not self._facts_sent and self._facts is not None:
            self._facts_sent, facts = True, {self._rank: self._facts.to_json()}
        return Report(
            facts,
            dict.fromkeys(rest.released, 1),
            frozenset(rest.unsaved),
            frozenset(rest.unread),
            dict.fromkeys(rest.settled, 1),
            dict.fromkeys(rest.landed, 1),
        )

    def statistics(self) -> dict[str, Any] | None:
        """What was counted since the last call; None when it can wait, as the time that calls take can for a moment."""
        if self._arena is not None:
            lenders = {"put": self._arena.send, "get": self._arena.receive}
            self.counters.set("arena_used_bytes", sum(lender.used_bytes for lender in lenders.values()))
            self.counters.set("arena_high_water_bytes", sum(lender.most_bytes for lender in lenders.values()))
            for direction, lender in lenders.items():
                waits, seconds = lender.take_waits()
                if waits:
                    self.counters.add(f"arena_waits:{direction}", waits)
                    self.counters.add(f"arena_wait_seconds:{direction}", seconds)
        self._summary.tick()
        now = time.monotonic()
        if not self.counters.urgent and now - self._counted_at < COUNT_SECONDS:
            return None
        self._counted_at = now
        return self.counters.take()

    def close(self) -> None:
        """Stop all threads and close the store."""
        if self._transfers is not None:
            self._transfers.close()
        if self._client is not None:
            self._client.close()

    def _set_up(self, decision: Decision) -> None:
        """Act on the scheduler's decision, once."""
        if not decision.caches or self._facts is None or self._arena is None or self._client is None:
            return
        if self._transfers is not None:
            return
        device = self._views[0].cache.device
        caches: dict[str, dict[int, torch.Tensor]] = {}
        for layer, view in zip(self._facts.layers, self._views, strict=True):
            caches.setdefault(layer.cache, {})[layer.index] = view.cache
        plan = make_plan(
            held_objects(decision, self._facts),
            caches.pop("", {}),
            {
                layer.index: groups.index(layer.group)
                for kind, groups in zip(decision.kinds, decision.groups, strict=True)
                for layer in layers_of(kind, self._facts)
            },
            further=caches,
            direct_piece_bytes=direct_limit(self._config.protocol, device),
            seal_bytes=seal_bytes(self._config.verify),
        )
        self._arena.cut(plan.slot_bytes)
        lane = Lane(device)
        self._transfers = Transfers(
            Rank(
                decision.namespace, plan, self._arena, lane, self._client.current, self._completions, self.counters.add,
                Underway(self._epoch),
            )
        )  # fmt: skip
        direct = sum(bool(item.pieces) for item in plan.objects)
        self.counters.set("objects_per_block", len(plan.objects))
        self.counters.set("segments_per_object", max((len(item.pieces) or 1 for item in plan.objects), default=0))
        logger.info(
            "rank %d holds %d objects per block, %d of them transferred directly", self._rank, len(plan.objects), direct
        )


def _storages(views: Sequence[rank_facts.LayerView]) -> list[tuple[int, int]]:
    """Address and bytes of every allocation behind the caches, for direct transfers."""
    ranges: dict[int, int] = {}
    for view in views:
        storage: torch.UntypedStorage = view.cache.untyped_storage()
        ranges[storage.data_ptr()] = storage.nbytes()
    return sorted(ranges.items())
