"""Members of a pool, read from their pods: what they were given, what they reported, who owns them.

Why this exists: a pod is large and a pool may have thousands. The controller keeps one small frozen value of
each. The truth about a member is its own command line and its report; the record annotation is compared with
them, never believed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvshare_layout import config, reports
from kvshare_operator.api import names
from kvshare_operator.core.injection.record import Record, read_record
from kvshare_operator.core.pool.conditions import reports_of
from kvshare_operator.core.pool.groups import Group, read_group, restart_selector, whole_number

_FLAG: Final = re.compile(r"--kv-transfer-config\.kv_connector_extra_config\.([a-z_]+)=(?:s:)?(\S+)")
_GONE: Final = frozenset({"Succeeded", "Failed"})


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who would have to be restarted: kind (lower case) and name in the pod's namespace."""

    kind: str
    name: str

    @property
    def text(self) -> str:
        """Return `deployment/llama-decode`."""
        return f"{self.kind}/{self.name}"

    def restart_command(self, namespace: str) -> str:
        """Return the command that replaces the owner's pods."""
        if self.kind in ("deployment", "statefulset", "daemonset"):
            return f"kubectl -n {namespace} rollout restart {self.text}"
        if self.kind == "pod":
            return f"kubectl -n {namespace} delete {self.text}"
        if (label := restart_selector(self.kind)) is not None:
            return f"kubectl -n {namespace} delete pods -l {label}={self.name}"
        return f"restart {self.text} in namespace {namespace}"


@dataclasses.dataclass(frozen=True)
class Member:
    """One pod that opted into a pool.

    Attributes:
        record: what the annotation says; None for a pod without one.
        store_tp: Store TP on its own command line; None for a worker or a pod without flags.
        cache_namespace: pool prefix on its own command line.
        report: what it reported; None until then.
        group: the group of pods that it belongs to; None when it stands alone.
    """

    uid: str
    namespace: str
    name: str
    pool: str
    owner: Owner
    record: Record | None
    store_tp: int | None = None
    cache_namespace: str = ""
    report: reports.MemberReport | None = None
    group: Group | None = None

    @property
    def injected(self) -> bool:
        """Whether the webhook injected it."""
        return self.record is not None and not self.record.reason

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker of a group, which never reports."""
        return self.injected and self.record is not None and self.record.role == "worker"

    @property
    def record_differs(self) -> bool:
        """Whether the record annotation contradicts the pod's own flags."""
        record = self.record
        if record is None or not self.injected or self.is_worker or self.store_tp is None:
            return False
        return (record.store_tp, record.cache_namespace) != (self.store_tp, self.cache_namespace)


def read_member(pod: Mapping[str, Any]) -> Member | None:
    """Read a pod; None for one that is over, has no annotation, or is going away.

    Works on whole pods and on metadata alone.
    """
    metadata = pod.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    pool = annotations.get(names.POOL)
    status = pod.get("status") or {}
    if not pool or status.get("phase") in _GONE or metadata.get("deletionTimestamp"):
        return None
    flags = dict(_flags(pod))
    store_tp = flags.get("store_tp_size", "")
    group = read_group(metadata)
    return Member(
        uid=str(metadata.get("uid", "")),
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        pool=str(pool),
        owner=Owner(group.kind, group.name) if group else _owner(metadata),
        record=read_record(annotations),
        store_tp=whole_number(store_tp),
        cache_namespace=flags.get("cache_namespace", ""),
        report=_report(status),
        group=group,
    )


def _flags(pod: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for container in (pod.get("spec") or {}).get("containers") or []:
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        for entry in container.get("env") or []:
            if entry.get("name") == names.ARGS_VARIABLE:
                words.extend(str(entry.get("value") or "").split())
        for word in words:
            if match := _FLAG.fullmatch(str(word)):
                yield match[1], match[2]
            elif config.CONNECTOR_CLASS in str(word):
                yield from _json_settings(str(word)[str(word).find("{") :])


def _json_settings(text: str) -> Iterable[tuple[str, str]]:
    """Our settings in a JSON value, alone or inside MultiConnector."""
    try:
        value = json.loads(text)
        children = (value.get("kv_connector_extra_config") or {}).get("connectors") or []
        for entry in (value, *children):
            if entry.get("kv_connector") == config.CONNECTOR_CLASS:
                for key, setting in entry["kv_connector_extra_config"].items():
                    yield str(key), str(setting).removeprefix("s:")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return


def _report(status: Mapping[str, Any]) -> reports.MemberReport | None:
    """Return what the pod reported, of several engines the worst."""
    return reports.worst(reports_of(status))


def _owner(metadata: Mapping[str, Any]) -> Owner:
    references = metadata.get("ownerReferences") or []
    for reference in references:
        if not reference.get("controller"):
            continue
        kind, name = str(reference.get("kind", "")), str(reference.get("name", ""))
        suffix = (metadata.get("labels") or {}).get("pod-template-hash")
        if kind == "ReplicaSet" and suffix and name.endswith(f"-{suffix}"):
            return Owner("deployment", name.removesuffix(f"-{suffix}"))
        return Owner(kind.lower(), name)
    return Owner("pod", str(metadata.get("name") or metadata.get("generateName") or "unknown"))
