"""`helm test`: is the webhook asked, and does it answer? Seen from outside, through the API server.

Why this exists: everything between API server and webhook can be wrong at once: certificate, trust, network policy,
selector. A dry run of a pod that opts into a pool which nobody has goes the whole way, and must come back with the
webhook's record of why it was not injected. Nothing is stored.
"""

from __future__ import annotations

import json
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.edges.cluster_api import ApiError, ClusterApi

POOL: Final = "kvshare-dry-run-of-no-pool"
"""No pool has this name, so the answer does not depend on what is installed."""

Json = dict[str, Any]


def trial_pod() -> Json:
    """Return a pod that opts in and passes the restricted pod security standard."""
    amounts = {"cpu": "10m", "memory": "16Mi"}
    container = {
        "name": "vllm",
        "image": "kvshare.dev/probe:dry-run",
        "command": ["vllm", "serve", "none"],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "kvshare-dry-run-", "annotations": {names.POOL: POOL}},
        "spec": {
            "containers": [container],
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        },
    }


async def dry_run(api: ClusterApi, namespace: str) -> tuple[bool, str]:
    """Return (whether the webhook answered as it must, what was seen and what to do)."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    try:
        answer = await api.call("POST", path, query={"dryRun": "All"}, body=trial_pod())
    except ApiError as error:
        return False, f"the API server refused a dry run in namespace {namespace}: {error}"
    text = ((answer.get("metadata") or {}).get("annotations") or {}).get(names.INJECTED)
    if text is None:
        return False, (
            f"a pod in namespace {namespace} came back without {names.INJECTED}: the API server did not reach the "
            "webhook, or was not to ask it; look at the webhook's pods, at caBundle in its configuration, and at the "
            "API server's log for failed calls of inject.kvshare.dev"
        )
    try:
        reason = json.loads(text).get("reason")
    except (ValueError, AttributeError):
        reason = None
    if reason != "PoolNotFound":
        return False, f"the record of a pod whose pool does not exist says {text!r}, reason PoolNotFound expected"
    return True, f"the API server asks the webhook about pods in namespace {namespace}, and it answers"
