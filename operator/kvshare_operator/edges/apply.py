"""All writes of the controller to pools: the status by server-side apply; and events about pools and pods.

Why this exists: a steady state must write nothing, so what is there is compared first. No finalizers, no
annotations, no pods.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.status import Status, read_status
from kvshare_operator.core.pool.conditions import timestamp
from kvshare_operator.core.pool.members import Member
from kvshare_operator.edges import metrics
from kvshare_operator.edges.cluster_api import APPLY, ApiError, ClusterApi
from kvshare_operator.edges.pool_index import pools_path

log = logging.getLogger("kvshare.apply")
Json = dict[str, Any]
_EVENT_MESSAGE: Final = 1000
_UNTYPED: Final = "failed to create typed"


async def apply_status(api: ClusterApi, pool: Json, status: Status) -> bool:
    """Write the status of a pool if it differs from the stored one; return whether it was written."""
    before = read_status(pool.get("status"))
    wanted = as_json(status)
    if as_json(before) == wanted:
        return False
    metadata = pool["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"namespace": namespace, "name": name},
        "status": wanted,
    }
    query = {"fieldManager": names.CONTROLLER_MANAGER, "force": "true"}
    path = f"{pools_path(namespace, name)}/status"
    try:
        await api.call("PATCH", path, query=query, body=body, content_type=APPLY)
    except ApiError as error:
        # An object whose fields have other types than the schema: no write of it ever succeeds.
        error.retry = error.retry and _UNTYPED not in str(error)
        raise
    metrics.STATUS_WRITES.inc()
    await _tell(api, pool, before, status)
    return True


async def tell_unwritable(api: ClusterApi, pool: Json, status: Status, problem: str) -> None:
    """Post one event about a pool whose status the API server refuses, which happens to objects of looser rules.

    Its name says which pool and generation, so it is never repeated.
    """
    metadata = pool["metadata"]
    unique = hashlib.sha256(f"{metadata.get('uid')}{metadata.get('generation')}".encode()).hexdigest()[:12]
    accepted = next((one for one in status.conditions or [] if one.type == names.ACCEPTED), None)
    known = accepted is not None and accepted.status == "False"
    reason = accepted.reason if known and accepted is not None else "StatusRefused"
    message = accepted.message if known and accepted is not None else f"the API server refuses the status: {problem}"
    try:
        await _post_event(api, _about(pool), "Warning", reason, message, unique)
    except ApiError as error:
        if error.status != 409:
            log.info("an event was lost: %s", error)


def _about(pool: Json) -> Json:
    metadata = pool["metadata"]
    about = {"apiVersion": names.API_VERSION, "kind": names.KIND, "uid": metadata.get("uid", "")}
    return about | {"namespace": metadata["namespace"], "name": metadata["name"]}


def as_json(status: Status) -> Json:
    """Return a status as it is stored: camelCase, without what is not set."""
    return status.model_dump(by_alias=True, exclude_none=True, mode="json")


async def _tell(api: ClusterApi, pool: Json, before: Status, after: Status) -> None:
    """Post an event for each condition whose status or reason changed. Losing one is no error."""
    about = _about(pool)
    known = {c.type: (c.status, c.reason) for c in before.conditions or []}
    for condition in after.conditions or []:
        if known.get(condition.type) == (condition.status, condition.reason):
            continue
        quiet = condition.type not in known and condition.status != "False"
        told_elsewhere = condition.type == names.READY and condition.status == "False"
        if quiet or told_elsewhere or condition.status == "Unknown":
            continue
        try:
            kind = "Warning" if condition.status == "False" else "Normal"
            moment = f"{condition.type}{condition.reason}{datetime.datetime.now(datetime.UTC).isoformat()}"
            unique = hashlib.sha256(moment.encode()).hexdigest()[:12]
            message = f"{condition.type}: {condition.message}"
            await _post_event(api, about, kind, condition.reason, message, unique)
        except ApiError as error:
            log.info("an event was lost: %s", error)


async def tell_pod(api: ClusterApi, member: Member) -> None:
    """Post one event on a pod that was left as it was. Its name says what it tells, so it is never repeated."""
    record = member.record
    if record is None or not record.reason:
        return
    unique = hashlib.sha256(f"{member.uid}{record.reason}".encode()).hexdigest()[:12]
    pod = {"apiVersion": "v1", "kind": "Pod", "namespace": member.namespace, "name": member.name, "uid": member.uid}
    try:
        await _post_event(api, pod, "Warning", record.reason, f"not injected: {record.message}", unique)
    except ApiError as error:
        if error.status != 409:
            log.info("an event was lost: %s", error)


async def _post_event(api: ClusterApi, about: Json, kind: str, reason: str, message: str, unique: str) -> None:
    """Post an event about the object ``about`` names (apiVersion, kind, namespace, name, uid)."""
    now = timestamp(datetime.datetime.now(datetime.UTC))
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": about["namespace"], "name": f"{about['name'][:200]}.{unique}"},
        "involvedObject": about,
        "reason": reason,
        "message": message[:_EVENT_MESSAGE],
        "type": kind,
        "source": {"component": names.CONTROLLER_MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        await api.call("POST", f"/api/v1/namespaces/{about['namespace']}/events", body=body)
    except ApiError as error:
        metrics.EVENTS.labels("repeated" if error.status == 409 else "lost").inc()
        raise
    metrics.EVENTS.labels("posted").inc()
