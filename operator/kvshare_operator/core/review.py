"""An admission request in, an admission response out.

Why this exists: the one place that decides what the API server hears. It never raises: whatever goes wrong
on our side becomes "allowed, with a warning", because a cache must not keep an engine from starting.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from kvshare_operator.api import names
from kvshare_operator.api.pool import SpecError
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.injection import record
from kvshare_operator.core.injection.inject import Injected, inject
from kvshare_operator.core.injection.optin import misspelled, wanted_pool
from kvshare_operator.core.injection.patch import difference
from kvshare_operator.core.injection.settings import InjectionSettings
from kvshare_operator.core.pool.view import view

log = logging.getLogger("kvshare.review")
Json = dict[str, Any]
_WARNING_LENGTH = 256
"""Longer warnings are cut by clients."""
_DENIAL_LENGTH = 2048
"""A denial becomes an event and a condition of the pod's owner."""


@dataclasses.dataclass(frozen=True)
class Question:
    """Which pool a request needs: its namespace and name."""

    namespace: str
    pool: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """The response without its uid, and what happened as (decision, reason) for logs and metrics."""

    response: Json
    decision: str
    reason: str = ""


def question(request: Mapping[str, Any]) -> Question | None:
    """Say which pool must be looked up before ``answer``; None when the request is none of our business."""
    if request.get("operation") != "CREATE" or request.get("subResource"):
        return None
    pod = request.get("object")
    if not isinstance(pod, Mapping) or (request.get("kind") or {}).get("kind") not in (None, "Pod"):
        return None
    pool = wanted_pool(pod)
    return Question(str(request.get("namespace") or ""), pool) if pool else None


def ignore() -> Answer:
    """Return the answer to a request that is none of our business."""
    return Answer({"allowed": True}, "ignored")


def answer(
    request: Mapping[str, Any],
    pool: Mapping[str, Any] | None,
    settings: InjectionSettings,
    services: Collection[str] = (),
) -> Answer:
    """Review a pod that opted in. ``pool`` is the raw object, None when a live look-up found none.

    ``services`` are names of Services in the pod's namespace, as far as they are known.
    """
    asked = question(request)
    if asked is None:
        return ignore()
    pod = request["object"]
    try:
        return _answer(pod, asked, pool, settings, services)
    except Exception as error:  # whatever it is, the pod must start
        log.exception("review failed for a pod of pool %s/%s", asked.namespace, asked.pool)
        return failed(f"{type(error).__name__}")


def failed(problem: str) -> Answer:
    """Return the answer to a request during whose review we failed."""
    refused = refusal("InternalError", problem=problem)
    return Answer(
        {
            "allowed": True,
            "warnings": [_warning(refused.sentence())],
            "auditAnnotations": {"decision": "failed", "reason": refused.code},
        },
        "failed",
        refused.code,
    )


def _answer(
    pod: Mapping[str, Any],
    asked: Question,
    pool: Mapping[str, Any] | None,
    settings: InjectionSettings,
    services: Collection[str],
) -> Answer:
    if pool is None:
        return _refused(pod, asked, refusal("PoolNotFound", pool=asked.pool, namespace=asked.namespace), False)
    try:
        seen = view(pool, settings.connector_image)
    except SpecError as error:
        return _refused(pod, asked, refusal("PoolNotReady", pool=asked.pool, problem=str(error)), reject=False)
    outcome = inject(pod, seen, settings, services)
    if isinstance(outcome, Refusal):
        reject = seen.spec.on_conflict == "Reject" and not outcome.ours
        return _refused(pod, asked, outcome, reject)
    return _injected(pod, outcome)


def _injected(pod: Mapping[str, Any], outcome: Injected) -> Answer:
    operations = difference(pod, outcome.pod)
    decision = "injected" if operations else "unchanged"
    response: Json = {
        "allowed": True,
        "auditAnnotations": {"decision": decision, "record": outcome.record.to_json()},
    }
    if outcome.warnings:
        response["warnings"] = [_warning(text) for text in outcome.warnings]
    return Answer(_with_patch(response, operations), decision)


def _refused(pod: Mapping[str, Any], asked: Question, refused: Refusal, reject: bool) -> Answer:
    audit = {"decision": "denied" if reject else "skipped", "reason": refused.code}
    if reject:
        message = "; ".join((f"kvshare: {refused.sentence()}", *misspelled(pod)))
        status = {"code": 403, "message": _cut(message, _DENIAL_LENGTH)}
        return Answer({"allowed": False, "status": status, "auditAnnotations": audit}, "denied", refused.code)
    marked = copy.deepcopy(dict(pod))
    annotations = marked["metadata"]["annotations"]
    annotations[names.INJECTED] = record.of_refusal(asked.pool, refused).to_json()
    response: Json = {
        "allowed": True,
        "warnings": [_warning(f"not injected: {refused.sentence()}"), *map(_warning, misspelled(pod))],
        "auditAnnotations": audit,
    }
    return Answer(_with_patch(response, difference(pod, marked)), "skipped", refused.code)


def _with_patch(response: Json, operations: list[Json]) -> Json:
    if not operations:
        return response
    encoded = base64.b64encode(json.dumps(operations).encode()).decode()
    return {**response, "patchType": "JSONPatch", "patch": encoded}


def _warning(text: str) -> str:
    return _cut(f"kvshare: {text}", _WARNING_LENGTH)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
