"""All writes of the controller to pools: the status by server-side apply, and events about it.

Why this exists: a steady state must write nothing, so what is there is compared first. No finalizers, no
annotations, no pods.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.pool import Status, read_status
from kvshare_operator.core.pool.conditions import timestamp
from kvshare_operator.edges import metrics
from kvshare_operator.edges.cluster_api import APPLY, ApiError, ClusterApi
from kvshare_operator.edges.pool_index import pools_path

log = logging.getLogger("kvshare.apply")
Json = dict[str, Any]
_EVENT_MESSAGE: Final = 1000


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
    await api.call("PATCH", path, query=query, body=body, content_type=APPLY)
    metrics.STATUS_WRITES.inc()
    await _tell(api, pool, before, status)
    return True


def as_json(status: Status) -> Json:
    """Return a status as it is stored: camelCase, without what is not set."""
    return status.model_dump(by_alias=True, exclude_none=True, mode="json")


async def _tell(api: ClusterApi, pool: Json, before: Status, after: Status) -> None:
    """Post an event for each condition whose status or reason changed. Losing one is no error."""
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
            await _post_event(api, pool, kind, condition.reason, f"{condition.type}: {condition.message}")
        except ApiError as error:
            log.info("an event was lost: %s", error)


async def _post_event(api: ClusterApi, pool: Json, kind: str, reason: str, message: str) -> None:
    metadata = pool["metadata"]
    now = datetime.datetime.now(datetime.UTC)
    unique = hashlib.sha256(f"{reason}{message}{now.isoformat()}".encode()).hexdigest()[:12]
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": metadata["namespace"], "name": f"{metadata['name']}.{unique}"},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata.get("uid", ""),
        },
        "reason": reason,
        "message": message[:_EVENT_MESSAGE],
        "type": kind,
        "source": {"component": names.CONTROLLER_MANAGER},
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }
    await api.call("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", body=body)
