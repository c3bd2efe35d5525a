"""All objects of a managed store, and whether what is stored still says what they say.

Why this exists: a steady state writes nothing, so stored objects are compared before anything is applied. The
API server adds defaults, and others may add what is theirs: only what we say is compared. What we once said and
no longer say (a removed node selector) is noticed by a digest in an annotation; server-side apply removes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.core.store import master, network, nodes
from kvshare_operator.core.store.plan import StorePlan

Json = dict[str, Any]

PLURALS: Final = {
    "Deployment": ("/apis/apps/v1", "deployments"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Service": ("/api/v1", "services"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
}
_KEYS: Final = ("name", "uid")
"""Fields that name an element of a list of objects."""


def store_objects(plan: StorePlan) -> tuple[Json, ...]:
    """Return the store's objects in the order in which they are applied: policies before what they protect."""
    made = (
        network.master_policy(plan),
        network.nodes_policy(plan),
        master.service(plan),
        master.deployment(plan),
        nodes.service(plan),
        nodes.disruption_budget(plan),
        nodes.stateful_set(plan),
    )
    return tuple(_with_digest(one) for one in made)


def object_path(thing: Mapping[str, Any]) -> str:
    """Return the API path of one object."""
    base, plural = PLURALS[thing["kind"]]
    metadata = thing["metadata"]
    return f"{base}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"


def belongs_to(stored: Mapping[str, Any], uid: str) -> bool:
    """Whether a stored object is the store of the pool with this UID."""
    owners = (stored.get("metadata") or {}).get("ownerReferences") or []
    return any(one.get("uid") == uid and one.get("controller") for one in owners)


def says(stored: Any, wanted: Any) -> bool:
    """Whether ``stored`` says everything that ``wanted`` says."""
    if isinstance(wanted, Mapping):
        return isinstance(stored, Mapping) and all(
            key in stored and says(stored[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(stored, list) and _list_says(stored, wanted)
    return bool(stored == wanted)


def _list_says(stored: list[Any], wanted: list[Any]) -> bool:
    key = next((k for k in _KEYS if wanted and all(isinstance(one, Mapping) and k in one for one in wanted)), None)
    if key is None:
        return len(stored) == len(wanted) and all(says(a, b) for a, b in zip(stored, wanted, strict=True))
    present = {one.get(key): one for one in stored if isinstance(one, Mapping)}
    return all(one[key] in present and says(present[one[key]], one) for one in wanted)


def _with_digest(thing: Json) -> Json:
    text = json.dumps(thing, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {**thing, "metadata": {**thing["metadata"], "annotations": {names.APPLIED: digest}}}
