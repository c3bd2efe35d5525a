"""Glue of the scheduler side: vLLM's scheduler objects on one side, the ledgers on the other; no rule of its own.

Nothing in here asserts on ids or waits for the network: an assertion or a stall in this process stops the engine.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvshare_connector import compat
from kvshare_connector.counters import Counters
from kvshare_connector.lines import Summary
from kvshare_connector.scheduler import states
from kvshare_connector.scheduler.announcements import Announcements
from kvshare_connector.scheduler.apart import STREAMED, kept_apart
from kvshare_connector.scheduler.loads import Loads
from kvshare_connector.scheduler.lookup import Lookups, Question
from kvshare_connector.scheduler.membership import Membership, compare_manifest
from kvshare_connector.scheduler.pins import Pins
from kvshare_connector.scheduler.planning import Planning
from kvshare_connector.scheduler.probe import Probe
from kvshare_connector.scheduler.resets import Resets
from kvshare_connector.scheduler.saves import Offered, SaveJob, SaveRule, Saves
from kvshare_connector.scheduler.tables import KindGroups, Tables
from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.wire import Report, Step
from kvshare_layout import Decision, RankFacts
from kvshare_layout.config import Parsed
from kvshare_layout.kinds import usable_blocks

logger = logging.getLogger(__name__)

#: Share of the cache's blocks that may be pinned for saves, in percent.
PIN_PERCENT = 5
#: Seconds that a positive lookup may be used: below half of Mooncake's default lease of 10 s.
REUSE_SECONDS = 4.0
#: Seconds that a block whose GET failed counts as missing.
FORGET_SECONDS = 1.0
#: Seconds that the engine steps without requests to bring the facts of the ranks here.
FACTS_SECONDS = 2.0
#: Seconds without news from the ranks after which the engine may sleep although something is open, instead of spinning
#: while a store hangs; and seconds after which any call that wakes it makes it look again.
NEWS_SECONDS, LOOK_AGAIN_SECONDS = 2.0, 0.5


class SchedulerSide:
    """The connector in the scheduler process.

    Args:
        parsed: the connector's configuration and the mistakes in it.
        vllm_config: vLLM's resolved configuration.
        kv_cache_config: vLLM's cache configuration.
        open_store: opens a metadata-only store client.
        problem: what is known to keep this engine from caching, ``Reason: sentence``.
    """

    def __init__(
        self,
        parsed: Parsed,
        vllm_config: Any,
        kv_cache_config: Any,
        open_store: Callable[[], ObjectStore],
        problem: str,
    ) -> None:
        self._config, self._open_store = parsed.config, open_store
        self._kv_role = str(vllm_config.kv_transfer_config.kv_role)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._ranks = (
            vllm_config.parallel_config.tensor_parallel_size * vllm_config.parallel_config.pipeline_parallel_size
        )
        self._membership = Membership(parsed, vllm_config, kv_cache_config, self._ranks, problem)
        self._decision_to_send = False
        self._pool: Any = None
        self._requests: dict[str, Any] = {}
        self._first_block: dict[str, tuple[int, int]] = {}  # with the resets that had happened at the lookup
        self._asked: dict[str, int] = {}  # tokens that a lookup was about, until blocks are allocated
        self._outdated: set[str] = set()  # requests whose blocks are from before a reset
        self._computing: set[str] = set()  # requests that have been scheduled since their blocks were allocated
        # Requests that began in or behind a step in which another connector loads, and the tokens that they began with.
        self._beside: dict[str, int] = {}
        self._sessions = False
        self._facts_wanted_since: float | None = None
        self._lookups = Lookups(timeout=self._config.lookup_timeout_seconds, reuse=REUSE_SECONDS, forget=FORGET_SECONDS)
        self._loads = Loads()
        self._offered = Offered()
        rule = SaveRule.of(self._config.role, self._config.save_decode_cache, self._kv_role)
        self._saves = Saves(rule, self._block_tokens, self._offered)
        self._pins = Pins(0, self._ranks, self._touch, self._release)
        self._resets = Resets(self._ranks)
        self._announcements = Announcements(self._ranks) if compat.events_enabled(vllm_config) else None
        self._tail: list[SaveJob] = []
        self._last_news = self._last_step = 0.0
        self._unread: set[bytes] = set()
        self._probe: Probe | None = None
        self._summary = Summary("scheduler")
        self.counters = Counters(heard=self._summary.counted)
        self._planning = Planning(self._saves, self._block_tokens, self._announcements, self.counters)

    # Start-up.

    def bind_block_pool(self, pool: Any) -> None:
        """The engine's block pool exists."""
        self._pool = pool
        self._pins = Pins(max(1, pool.num_gpu_blocks * PIN_PERCENT // 100), self._ranks, self._touch, self._release)

    def take_facts(self, facts: Sequence[RankFacts]) -> None:
        """Facts of some ranks, at start-up; decides once those of all have come."""
        self._act_on(self._membership.take_facts(facts, wait=True))

    def _decide_if_ready(self, facts: Sequence[RankFacts] = ()) -> None:
        """Inside vLLM's MultiConnector the facts come with the steps, and the weights when they have been read."""
        if self.decision is None:
            self._act_on(self._membership.take_facts(facts, wait=False))

    def _decide_now_or_later(self) -> None:
        try:
            self._decide_if_ready()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """An error of ours must cost the cache, never the engine: from now on nothing is cached."""
        self._act_on(self._membership.give_up(error))

    def _act_on(self, decision: Decision | None) -> None:
        """Follow a new decision: tell the ranks, and ask the store if it is to be asked."""
        if decision is None:
            return
        self._decision_to_send = True
        if decision.caches and self._probe is None:
            self._probe = Probe(self._open_store, overdue=self._config.lookup_timeout_seconds)
            if decision.verdict.state == "shared":
                self._probe.run(lambda store: compare_manifest(store, decision))
            if self._saves.epoch:
                self.reset()  # again: the first one came before there was a namespace to empty

    @property
    def decision(self) -> Decision | None:
        """What the engine does; None while facts are missing."""
        return self._membership.decision

    # Requests.

    def new_request(self, request: Any) -> None:
        """A request has arrived: remember it and start to look for its blocks."""
        self._requests[request.request_id] = request
        if reason := kept_apart(request):
            self.counters.add(f"skipped_requests:{reason}")
        self._sessions = self._sessions or reason == STREAMED
        try:
            self._decide_if_ready()
            self._act_on(self._membership.check_canary())
            if self._sessions:
                self._act_on(self._membership.session_seen())
            if self._may_load(request):
                self._ask(request, self._local_blocks(request))
        except Exception as error:
            self._give_up(error)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the ``local_tokens`` that the engine has; ``None`` asks to come again."""
        # It has no blocks now. vLLM 0.33 may allocate some and tell us steps later, or never if the request ends first.
        self._computing.discard(request.request_id)
        self._beside.pop(request.request_id, None)
        if not self._may_load(request):
            return 0, False
        self._asked[request.request_id] = request.num_tokens - local_tokens
        start = local_tokens // self._block_tokens
        self._first_block[request.request_id] = start, self._saves.epoch
        try:
            found = self._ask(request, start)
        except Exception as error:
            self._give_up(error)
            return 0, False
        if found is None:
            return None, False
        blocks = usable_blocks(found, draft_drop=self._draft_drop)
        return (blocks * self._block_tokens, True) if blocks else (0, False)

    def _may_load(self, request: Any) -> bool:
        return (
            self.decision is not None
            and self.decision.caches
            and self._pool is not None
            and self._kv_role != "kv_producer"
            and not kept_apart(request)
            and not getattr(request, "skip_reading_prefix_cache", False)
            and not self._resets.under_way
        )

    def _ask(self, request: Any, start: int) -> int | None:
        """Blocks found from ``start`` on, or None while the answer is not there."""
        if self._probe is None or self.decision is None:
            return 0
        now = time.monotonic()
        for answer in self._probe.answers():
            self._lookups.answer(answer.request_id, answer.serial, answer.found, now)
            # What has left the store, for example with a master that restarted, is worth saving again.
            self._offered.discard(answer.absent)
            if self._announcements is not None:
                self._announcements.removed(answer.absent[:1])
            self.counters.add("lookups")
            for kind, asked in answer.keys.items():
                self.counters.add(f"lookup_keys:{kind.rstrip('-')}", asked)
            self.counters.add("lookup_seconds", answer.seconds)
            self.counters.observe("keys_per_lookup", sum(answer.keys.values()))
            for name, calls in answer.failures.items():
                self.counters.add(f"failed_lookups:{name}", calls)
        # The last token is always computed, so that there is something to sample from.
        usable = (request.num_tokens - 1) // self._block_tokens
        before = self._lookups.timeouts
        hashes, preemptions = tuple(request.block_hashes[:usable]), request.num_preemptions
        result = self._lookups.ask(
            request.request_id, start, hashes, now, preemptions=preemptions, whole=self.decision.whole
        )
        self.counters.add("lookup_timeouts", self._lookups.timeouts - before)
        if isinstance(result, Question):
            if not self._probe.answers_soon:
                self._lookups.answer(result.request_id, result.serial, 0, now)
                self.counters.add("lookups_skipped")
                return 0
            kinds = [(kind, self.decision.objects_of(kind)) for kind, _ in self.decision.blocks]
            self._probe.ask(result, self.decision.namespace, kinds, spare=int(self.decision.draft_drop))
            return None
        return result

    def _local_blocks(self, request: Any) -> int:
        """Blocks at the start of the request that the engine's own cache holds now."""
        hashes = request.block_hashes

        def cached(number: int, groups: tuple[int, ...]) -> bool:
            return self._pool.get_cached_block(hashes[number], list(groups)) is not None

        found = self._kinds.local_hit(len(hashes), cached, spare=int(self._draft_drop))
        return usable_blocks(found, draft_drop=self._draft_drop)

    @property
    def _draft_drop(self) -> bool:
        return self.decision is not None and self.decision.draft_drop

    @property
    def _kinds(self) -> KindGroups:
        """The kinds of blocks of the model, none while nothing is cached."""
        blocks = () if self.decision is None else self.decision.blocks
        kinds, groups = tuple(kind for kind, _ in blocks), tuple(groups for _, groups in blocks)
        return KindGroups(kinds, groups, lambda block_id: bool(self._pool.blocks[block_id].is_null))

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        """The engine allocated blocks for a request, ``external_tokens`` of which must be loaded.

        Args:
            request: the request.
            tables: its block tables, one for each cache group.
            external_tokens: tokens behind the local ones.
        """
        request_id = request.request_id
        self._computing.discard(request_id)
        self.counters.add("asked_tokens", self._asked.pop(request_id, 0))
        if external_tokens <= 0:
            self._loads.drop(request_id)
            self._lookups.allocated_without_hit(request_id)
            return
        self.counters.add("found_tokens", external_tokens)
        start, epoch = self._first_block.get(request_id, (0, self._saves.epoch))
        end = start + external_tokens // self._block_tokens
        blocks = self._kinds.to_load(tables, request.block_hashes, start, end)
        whole = self.decision is not None and self.decision.whole
        self._loads.plan(request_id, start, end - start, blocks, epoch, whole=whole)

    def finished(self, request: Any, tables: Tables) -> None:
        """A request has ended; the blocks in its ``tables`` are about to be freed."""
        request_id = request.request_id
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        # The last token was sampled and never computed.
        ready = min(request.num_tokens - 1, computed)
        # The engine counts the tokens of a load as computed as soon as it is planned.
        if (unproven := self._loads.unproven_from(request_id)) is not None:
            ready = min(ready, unproven * self._block_tokens)
        if request_id not in self._computing or self._in_doubt(request_id, computed):
            # The same for a load of another connector beside this one: nothing has been computed on top of it.
            ready = 0
        if self._saving(request) and (job := self._job(request, ready, tables)) is not None:
            self._tail.append(job)
        self._loads.void(request_id)
        self._lookups.forget(request_id)
        self._saves.forget(request_id)
        self._outdated.discard(request_id)
        self._computing.discard(request_id)
        self._beside.pop(request_id, None)
        self._first_block.pop(request_id, None)
        self._asked.pop(request_id, None)
        self._requests.pop(request_id, None)

    # Steps.

    def step(self, scheduler_output: Any) -> Step:
        """What the ranks must do in this step."""
        self._decide_now_or_later()
        saves, self._tail = self._tail, []
        cached = scheduler_output.scheduled_cached_reqs
        for request_id in (scheduler_output.preempted_req_ids or set()) | set(cached.resumed_req_ids):
            self._saves.rewind(request_id)
            self._outdated.discard(request_id)
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            first = request_id not in self._computing
            self._computing.add(request_id)
            if request is None:
                continue
            start = computed.get(request_id, 0)
            if first and (self._beside or getattr(scheduler_output, "has_sync_kv_loads", False)):
                # Another connector loads in this very step, or in one whose results are not here, and may fail.
                self._beside[request_id] = start
            if self._in_doubt(request_id, start - getattr(request, "num_in_flight_tokens", 0)):
                continue  # a later step, or the end, saves
            if not self._saving(request):
                continue
            ready = min(request.num_tokens, start + scheduled)
            tables = None
            if ready // self._block_tokens > 0:
                tables = compat.block_tables(scheduler_output, request_id)
            handed = compat.boundary_states(scheduler_output, request_id)
            if tables is not None and (job := self._job(request, ready, tables, handed)) is not None:
                saves.append(job)
        decision = self.decision if self._decision_to_send else None
        self._decision_to_send = False
        sent = Step(decision, self._saves.epoch, self._loads.take(), tuple(saves))
        self._last_step = time.monotonic()
        if decision is not None or sent.loads or saves:
            self._last_news = self._last_step
        return sent

    def _in_doubt(self, request_id: str, computed: int) -> bool:
        """Whether nothing says yet that a load of another connector, on which a request rests, has worked.

        Args:
            request_id: the request.
            computed: its tokens that are known to be computed: without those of steps whose results are not here.
        """
        if computed > self._beside.get(request_id, -1):
            self._beside.pop(request_id, None)
        return request_id in self._beside

    def _saving(self, request: Any) -> bool:
        return (
            self.decision is not None
            and self.decision.caches
            and self._pool is not None
            and not kept_apart(request)
            and request.request_id not in self._outdated
            # The end of a reset removes whatever is there by then.
            and not self._resets.under_way
        )

    def _job(
        self, request: Any, ready_tokens: int, tables: Tables, handed: Sequence[states.Handed] = ()
    ) -> SaveJob | None:
        """A save job for what became ready, pinned; None when there is nothing or no room for it."""
        try:
            return self._planning.job(request, ready_tokens, tables, handed, kinds=self._kinds, pins=self._pins)
        except Exception as error:
            self._give_up(error)
            return None

    def _touch(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def _release(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def output(
        self,
        report: Report | None,
        finished_recving: Sequence[str],
        invalid_block_ids: frozenset[int],
        failed_recving: frozenset[str] = frozenset(),
    ) -> None:
        """Results of the ranks."""
        if report is not None:
            self._take_report(report)
        self._loads.invalid(invalid_block_ids)
        self._loads.failed(failed_recving)
        # Whosever load it was: the engine keeps blocks reserved for it, so that a second one could wait for ever.
        for request_id in failed_recving & self._requests.keys():
            self._lookups.bypass(request_id)
        for plan, good in self._loads.finish(finished_recving):
            self.counters.add("hit_tokens", good * self._block_tokens)
            if plan.request_id not in self._outdated:
                for part in plan.blocks:
                    read = [n < plan.first_block + good for n in part.numbers]
                    self._offered.add(itertools.compress(part.block_hashes, read), frozenset({part.kind}))
            if good < plan.count:
                self.counters.add("failed_loads")
                missing = tuple(plan.block_hashes & self._unread)
                self._lookups.load_failed(missing, time.monotonic())
                if plan.request_id in self._requests:
                    self._lookups.bypass(plan.request_id)
                self._offered.discard(missing)
                self._unread.difference_update(missing)
        if not self._loads.in_flight:
            self._unread.clear()

    def _take_report(self, report: Report) -> None:
        self._last_news = time.monotonic()
        if report.facts and self.decision is None:
            try:
                self._decide_if_ready([RankFacts.from_json(text) for text in report.facts.values()])
            except Exception as error:
                self._give_up(error)
        for job_id, ranks in report.released.items():
            self._pins.reported(job_id, ranks)
        self._offered.discard(report.unsaved)
        self._unread |= report.unread
        if self._announcements is not None:
            self._announcements.failed(report.unsaved)
            self._announcements.removed(report.unread)
            for job_id, ranks in report.landed.items():
                self._announcements.landed(job_id, ranks)
        for epoch, ranks in report.settled.items():
            if self._resets.settled(epoch, ranks):
                self._remove_all()

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping although it has no request.

        vLLM's processes spin while it steps. Pins that outlast a hanging store are released with the next request or
        call: the engine is idle, so nobody else wants the blocks.
        """
        self._decide_now_or_later()
        if self._tail or self._decision_to_send:
            return True
        if self.decision is None and not self._membership.facts_complete:
            now = time.monotonic()
            self._facts_wanted_since = self._facts_wanted_since or now
            return now - self._facts_wanted_since < FACTS_SECONDS
        announcing = self._announcements is not None and self._announcements.open
        if not (self._pins.jobs or self._resets.waits_for_ranks or announcing):
            return False
        now = time.monotonic()
        return now - self._last_news < NEWS_SECONDS or now - self._last_step > LOOK_AGAIN_SECONDS

    # Reset.

    def reset(self) -> bool:
        """Empty this engine's namespace; never waits. False while blocks are still pinned or being loaded."""
        self._saves.reset()
        self._lookups.forget_answers()
        if self._announcements is not None:
            self._announcements.reset()
        # Where the engine could not empty its own cache, what that still holds must not come back through saves.
        self._outdated = {id_ for id_, request in self._requests.items() if request.num_computed_tokens > 0}
        if self._pool is not None:
            self._offered.add(compat.cached_hashes(self._pool), frozenset(kind.name for kind in self._kinds.kinds))
        if self.decision is not None and self.decision.caches:
            self._resets.begin(self._saves.epoch)
            self._last_news = time.monotonic()
            self._remove_all()
        return self._pins.jobs == 0 and self._loads.in_flight == 0

    def _remove_all(self) -> None:
        """Remove every key of the namespace in the background; lookups answer "no hit" until that has worked."""
        if self._probe is None or self.decision is None:
            return
        prefix, number = self.decision.namespace + "/", self._resets.removal_started()
        probe = self._probe

        def remove(store: ObjectStore) -> None:
            removed = store.remove_prefix(prefix)
            if removed >= 0:
                logger.info("removed %d objects of %s", removed, prefix)
                self.counters.add("removed_objects", removed)
                self._resets.removed(number)
            elif not probe.closing:
                time.sleep(1.0)
                probe.run(remove)

        probe.run(remove)

    # Observation.

    def events(self) -> list[Any]:
        """The engine's events about the store since the last call."""
        if self._announcements is None:
            return []
        return compat.kv_events(self._announcements.take(), self._block_tokens)

    def statistics(self) -> dict[str, Any]:
        """What was counted since the last call, and the labels of the member metric once after every decision."""
        self._summary.tick()
        self.counters.set("pinned_blocks", self._pins.blocks)
        member = self._membership.take_labels()
        return {**self.counters.take(), "member": dict(member) if member else None}

    def close(self) -> None:
        """Stop the background thread."""
        if self._probe is not None:
            self._probe.close()
