"""Groups of pods that together run one engine: LeaderWorkerSet and Ray clusters (KubeRay).

Why this exists: only the leader carries flags and reports, but every pod of a group loads the connector's code. A
group whose template opted in for some pods only never shares, and nothing else would say why. Reads labels and
annotations that these projects put on their pods; both are there in metadata alone.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

_LWS: Final = "leaderworkerset.sigs.k8s.io"
LWS_NAME: Final = f"{_LWS}/name"
LWS_GROUP: Final = f"{_LWS}/group-index"
LWS_WORKER: Final = f"{_LWS}/worker-index"
LWS_SIZE: Final = f"{_LWS}/size"
RAY_CLUSTER: Final = "ray.io/cluster"
RAY_NODE_TYPE: Final = "ray.io/node-type"
_NUMBER: Final = re.compile(r"[0-9]{1,9}")


@dataclasses.dataclass(frozen=True)
class Group:
    """The group that a pod belongs to.

    Attributes:
        kind, name: the object that made it, for example `leaderworkerset`.
        number: which of its groups; empty where there is one.
        size: how many pods it has; None where the pod does not tell.
        leader: whether this pod is the one that runs vLLM's server.
    """

    kind: str
    name: str
    number: str
    size: int | None
    leader: bool

    @property
    def text(self) -> str:
        """Return `leaderworkerset/llama, group 0`."""
        return f"{self.kind}/{self.name}" + (f", group {self.number}" if self.number else "")


def read_group(metadata: Mapping[str, Any]) -> Group | None:
    """Read a pod's group from its metadata; None for a pod that stands alone."""
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if name := labels.get(LWS_NAME):
        size = str(annotations.get(LWS_SIZE, ""))
        leader = not is_worker(labels)
        number = str(labels.get(LWS_GROUP, ""))
        return Group("leaderworkerset", str(name), number, whole_number(size), leader)
    if name := labels.get(RAY_CLUSTER):
        return Group("raycluster", str(name), "", None, labels.get(RAY_NODE_TYPE) != "worker")
    return None


def whole_number(text: str) -> int | None:
    """Read a number that somebody may have written by hand; None for anything else, however it looks."""
    return int(text) if _NUMBER.fullmatch(text) else None


def is_worker(labels: Mapping[str, Any]) -> bool:
    """Whether labels say that a pod is a group's worker, which starts no server of its own.

    LeaderWorkerSet numbers its leaders in their template, and its workers by a webhook of its own, which may be called
    after ours: a pod of a set without a number is a worker.
    """
    if labels.get(RAY_NODE_TYPE) == "worker":
        return True
    return bool(labels.get(LWS_WORKER, "" if labels.get(LWS_NAME) else "0") != "0")


def restart_selector(kind: str) -> str | None:
    """Return the label that selects all pods of such a group's owner; None for other kinds."""
    return {"leaderworkerset": LWS_NAME, "raycluster": RAY_CLUSTER}.get(kind)


def incomplete_groups(present: Iterable[Group]) -> list[tuple[Group, int, str]]:
    """Return (group, pods that opted in, what is missing) of every group that opted in only in part.

    ``present`` has one entry for each pod that opted in.
    """
    found: dict[str, list[Group]] = collections.defaultdict(list)
    for group in present:
        found[group.text].append(group)
    out = []
    for _, pods in sorted(found.items()):
        size = next((one.size for one in pods if one.size is not None), None)
        if not any(one.leader for one in pods):
            out.append((pods[0], len(pods), f"{pods[0].text}: its leader has not opted in"))
        elif size is not None and len(pods) < size:
            out.append((pods[0], len(pods), f"{pods[0].text}: {len(pods)} of {size} pods have opted in"))
    return out
