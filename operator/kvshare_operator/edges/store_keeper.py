"""The managed stores in the cluster: reads what is there, applies what differs, says how the store is.

Why this exists: ``core.store`` says what a store consists of; this is the only place that writes it. Objects are
read and compared first, so a steady state writes nothing; one that belongs to somebody else is never touched.
Nothing is ever deleted here: the API server removes a store together with its pool.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import urllib.parse
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.pool import Spec
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.store import objects
from kvshare_operator.core.store.health import StoreState, missing_pods, pod_problems
from kvshare_operator.core.store.plan import StorePlan, memory_sentence, plan_store
from kvshare_operator.core.store.settings import StoreSettings
from kvshare_operator.edges import metrics
from kvshare_operator.edges.cluster_api import APPLY, ApiError, ClusterApi

log = logging.getLogger("kvshare.stores")
Json = dict[str, Any]
_FRESH_SECONDS: Final = 10.0
"""How long a complete store is not looked at again; events of members come faster than stores change."""

_SETTLING_SECONDS: Final = 300.0
"""How long an incomplete store is looked at more often than everything else."""


class StoreKeeper:
    """Keeps the objects of managed stores as they should be."""

    def __init__(self, api: ClusterApi, settings: StoreSettings, fresh_seconds: float = _FRESH_SECONDS) -> None:
        self.api, self.settings, self.fresh_seconds = api, settings, fresh_seconds
        self._seen: dict[str, tuple[float, StorePlan, StoreState]] = {}
        self._waiting: dict[str, float] = {}

    async def keep(self, pool: Json, spec: Spec) -> StoreState:
        """Look at one pool's store, and mend it. Raises ApiError when trying again may help."""
        metadata = pool["metadata"]
        namespace, name, uid = str(metadata["namespace"]), str(metadata["name"]), str(metadata.get("uid", ""))
        plan = plan_store(namespace, name, uid, spec, self.settings)
        if isinstance(plan, Refusal):
            return StoreState(problem=plan)
        when, last, state = self._seen.get(uid, (0.0, None, None))
        if state is not None and last == plan and state.complete and time.monotonic() - when < self.fresh_seconds:
            return state
        if metadata.get("deletionTimestamp"):
            self._seen.pop(uid, None)
            return StoreState(nodes=plan.nodes)
        state = await self._keep(plan)
        self._forget_old()
        self._seen[uid] = (time.monotonic(), plan, state)
        if state.complete or last != plan:
            self._waiting[uid] = time.monotonic()
        return state

    def settling(self, pool: Json) -> bool:
        """Whether a store became incomplete, or was changed, so recently that looking again soon is worth it.

        A store that stays incomplete is looked at by the full pass, like everything else.
        """
        since = self._waiting.get(str(pool["metadata"].get("uid", "")))
        return since is not None and time.monotonic() - since < _SETTLING_SECONDS

    async def _keep(self, plan: StorePlan) -> StoreState:
        stored: dict[str, Json] = {}
        for wanted in objects.store_objects(plan):
            found = await self._one(plan, wanted)
            if isinstance(found, Refusal):
                return StoreState(problem=found, nodes=plan.nodes)
            stored[wanted["kind"]] = found
        state = StoreState(
            nodes=plan.nodes,
            ready_nodes=min(_ready(stored["StatefulSet"]), plan.nodes),
            master_ready=_ready(stored["Deployment"]) > 0,
            needs=memory_sentence(plan),
        )
        if state.complete:
            return state
        sets = stored["StatefulSet"], stored["Deployment"]
        problems = (*missing_pods(*sets), *pod_problems(await self._pods(plan)))
        return dataclasses.replace(state, pod_problems=problems)

    async def _one(self, plan: StorePlan, wanted: Json) -> Json | Refusal:
        """Return one object as it is stored after it was looked at, or why it cannot be made."""
        path = objects.object_path(wanted)
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        try:
            try:
                stored = await self.api.call("GET", path)
            except ApiError as error:
                if error.status != 404:
                    raise
            else:
                if not objects.belongs_to(stored, plan.uid):
                    return refusal("StoreObjectForeign", kind=kind, name=name)
                if objects.says(stored, wanted):
                    return stored
            query = {"fieldManager": names.CONTROLLER_MANAGER, "force": "true"}
            applied = await self.api.call("PATCH", path, query=query, body=wanted, content_type=APPLY)
        except ApiError as error:
            if error.retry:
                raise
            return refusal("StoreRefused", kind=kind, name=name, problem=str(error).rstrip("."))
        metrics.STORE_WRITES.inc()
        log.info("applied %s %s/%s", kind, plan.namespace, name)
        return applied

    async def _pods(self, plan: StorePlan) -> list[Json]:
        query = {"labelSelector": f"{names.STORE}={plan.pool}"}
        found = await self.api.call("GET", f"/api/v1/namespaces/{urllib.parse.quote(plan.namespace)}/pods", query=query)
        labelled = found.get("items") or []
        return [
            pod for pod in labelled if ((pod.get("metadata") or {}).get("labels") or {}).get(names.STORE) == plan.pool
        ]

    def _forget_old(self) -> None:
        """Drop what was kept about pools that nobody asked for in a while."""
        limit = time.monotonic() - 3600
        self._waiting = {uid: since for uid, since in self._waiting.items() if uid in self._seen or since > limit}
        self._seen = {uid: kept for uid, kept in self._seen.items() if kept[0] > limit}


def _ready(stored: Json) -> int:
    status = stored.get("status") or {}
    if status.get("observedGeneration", 0) < (stored.get("metadata") or {}).get("generation", 0):
        return 0
    return int(status.get("readyReplicas") or 0)
