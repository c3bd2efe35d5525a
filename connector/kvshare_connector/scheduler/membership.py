"""Membership: what this engine is to its pool, decided once, and who is told.

From the facts of all ranks and of the engine to one decision; to the log, the metric and the operator's report. It
carries nothing out: what follows from a decision is the caller's business.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvshare_connector import compat
from kvshare_connector.scheduler import engine_facts
from kvshare_connector.scheduler.reporter import Reporter
from kvshare_connector.store.protocol import ObjectStore
from kvshare_layout import Decision, MemberReport, RankFacts, Verdict, decide
from kvshare_layout.config import Parsed
from kvshare_layout.fingerprint import canonical_json, differing_fields
from kvshare_layout.keys import manifest_key

logger = logging.getLogger(__name__)


class Membership:
    """The verdict of one engine.

    Args:
        parsed: the connector's configuration and the mistakes in it.
        vllm_config: vLLM's resolved configuration.
        kv_cache_config: vLLM's cache configuration.
        ranks: ranks whose facts are needed.
        problem: what is known to keep this engine from caching, ``Reason: sentence``.
    """

    def __init__(self, parsed: Parsed, vllm_config: Any, kv_cache_config: Any, ranks: int, problem: str) -> None:
        self._parsed, self._vllm_config, self._kv_cache_config = parsed, vllm_config, kv_cache_config
        self._ranks, self._problem = ranks, problem
        self._facts: dict[int, RankFacts] = {}
        self._canary_checked = False
        self._labels: dict[str, str] | None = None
        self._reporter = Reporter(parsed.config)
        self.decision: Decision | None = None
        self._weights: Future[tuple[str, str]] = Future()
        threading.Thread(target=self._identify_weights, name="kvshare-weights", daemon=True).start()

    def _identify_weights(self) -> None:
        """Read the weights beside everything else: it may take seconds, which no step has."""
        try:
            self._weights.set_result(engine_facts.identify_weights(self._vllm_config))
        except Exception as error:
            self._weights.set_exception(error)

    def take_facts(self, facts: Sequence[RankFacts], *, wait: bool) -> Decision | None:
        """Facts of some ranks; the decision, when it could be made just now.

        Args:
            facts: of some ranks.
            wait: wait for the weights to be identified, as start-up may and no step may.
        """
        self._facts.update({item.rank: item for item in facts})
        if self.decision is not None or not self.facts_complete or not (wait or self._weights.done()):
            return None
        try:
            engine = engine_facts.engine_facts(
                self._vllm_config, self._kv_cache_config, self._problem, self._weights.result()
            )
            decision = decide(self._parsed, engine, list(self._facts.values()))
        except Exception as error:
            return self.give_up(error)
        return self._decided(decision)

    @property
    def facts_complete(self) -> bool:
        """Whether the facts of all ranks have come."""
        return len(self._facts) >= self._ranks

    def give_up(self, error: Exception) -> Decision:
        """An error of ours: disabled, with a reason that asks for a report. To be called while it is handled."""
        logger.exception("the connector failed and caches nothing from now on")
        message = f"{type(error).__name__}: {error}; this is a fault of the connector, please report it"
        return self._disabled("InternalError", message[:1024])

    def check_canary(self) -> Decision | None:
        """Once: the engine's hashes are those that the decision rests on, or the decision is to cache nothing."""
        if self._canary_checked or self.decision is None:
            return None
        self._canary_checked = True
        used = compat.current_none_hash()
        expected = engine_facts.none_hash(str(self._vllm_config.cache_config.prefix_caching_hash_algo))
        if not self.decision.caches or expected is None or used == expected:
            return None
        return self._disabled("HashSeedChanged", "the engine's hash seed is not the one found at start-up")

    def session_seen(self) -> Decision | None:
        """A session with streamed input has come: where what it takes back stays, the decision is to cache nothing.

        The engine's own cache then holds blocks under hashes that are not theirs, and other requests find them there.
        """
        if self.decision is None or not self.decision.caches:
            return None
        states = any(kind.ranks for kind in self.decision.kinds)
        if not states and compat.forgets_taken_back_blocks():
            return None
        return self._disabled(
            "StreamedInput", "a session with streamed input takes tokens back, which this engine's own cache may keep"
        )

    def take_labels(self) -> Mapping[str, str] | None:
        """Labels of the member metric, once after every decision."""
        taken, self._labels = self._labels, None
        return taken

    def _disabled(self, reason: str, message: str) -> Decision:
        return self._decided(Decision(Verdict("disabled", reason, message), self._parsed.config.cache_namespace))

    def _decided(self, decision: Decision) -> Decision:
        """Take a decision and tell everybody."""
        self.decision = decision
        verdict = decision.verdict
        logger.log(
            logging.INFO if verdict.state == "shared" else logging.WARNING,
            "verdict: %s, %s: %s (namespace %s)",
            verdict.state, verdict.reason, verdict.message, decision.namespace or "none",
        )  # fmt: skip
        layouts = sorted({layout for facts in self._facts.values() for layout in facts.layouts})
        self._labels = {
            "verdict": verdict.state, "reason": verdict.reason, "fingerprint": decision.fingerprint,
            "store_tp": str(decision.store_tp), "layouts": ",".join(layouts), "namespace": decision.namespace,
        }  # fmt: skip
        parallel = self._vllm_config.parallel_config
        self._reporter.post(
            MemberReport(
                decision.prefix, verdict.state, verdict.reason, verdict.message[:1024], decision.fingerprint,
                decision.namespace, decision.store_tp, parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
                tuple(layouts), decision.kv_heads or None, int(self._vllm_config.cache_config.block_size),
                dict(decision.manifest), compat.version_text()[:64], compat.engine_index(parallel),
            )
        )  # fmt: skip
        return decision


def compare_manifest(store: ObjectStore, decision: Decision) -> None:
    """Say by name in which fields this member differs from the first one of its pool: 0 % hits have a reason."""
    key, mine = manifest_key(decision.prefix), dict(decision.manifest)
    stored = store.get_bytes(key)
    if stored is None:
        store.put_bytes(key, canonical_json(mine))
        stored = store.get_bytes(key)
    try:
        other = {str(k): str(v) for k, v in json.loads(stored or b"{}").items()}
    except ValueError:
        return
    if other and (fields := differing_fields(mine, other)):
        text = "; ".join(f"{name}: {mine.get(name, 'none')} here, {other.get(name, 'none')} there" for name in fields)
        logger.warning("this member shares nothing with the first member of its pool, they differ in %s", text)
