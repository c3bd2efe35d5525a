"""The record annotation: what was injected, or why nothing was.

Why this exists: a pod must tell by itself what happened to it. A record is never trusted as input to an
injection (YAML gets copied); the controller compares it with the pod's own flags.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal

_NAME_LENGTH: Final = 253
_MESSAGE_LENGTH: Final = 1024
"""Refusals quote what the pod says; a pod whose annotations pass 256 KiB together would be denied for ours."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A parsed record annotation. ``reason`` is set when nothing was injected; then sizes are None."""

    pool: str
    revision: str = ""
    store_tp: int | None = None
    local_tp: int | None = None
    role: str = ""
    container: str = ""
    cache_namespace: str = ""
    reason: str = ""
    message: str = ""

    def to_json(self) -> str:
        """Return the annotation's value: compact, empty fields left out, always in the same order."""
        fields = {
            "pool": self.pool,
            "revision": self.revision,
            "storeTP": self.store_tp,
            "localTP": self.local_tp,
            "role": self.role,
            "container": self.container,
            "cacheNamespace": self.cache_namespace,
            "reason": self.reason,
            "message": self.message,
        }
        return json.dumps({k: v for k, v in fields.items() if v not in ("", None)}, separators=(",", ":"))


def of_refusal(pool: str, refused: Refusal) -> Record:
    """Return the record of a pod that was left as it was."""
    message = f"{refused.message} {refused.remedy}"
    return Record(pool=_cut(pool, _NAME_LENGTH), reason=refused.code, message=_cut(message, _MESSAGE_LENGTH))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def read_record(annotations: Mapping[str, Any]) -> Record | None:
    """Read the record of a pod; None when there is none, or none that can be read."""
    try:
        raw = json.loads(str(annotations[names.INJECTED]))
    except (KeyError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("pool"), str):
        return None

    def text(key: str) -> str:
        return value if isinstance(value := raw.get(key), str) else ""

    def number(key: str) -> int | None:
        value = raw.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return Record(
        pool=raw["pool"],
        revision=text("revision"),
        store_tp=number("storeTP"),
        local_tp=number("localTP"),
        role=text("role"),
        container=text("container"),
        cache_namespace=text("cacheNamespace"),
        reason=text("reason"),
        message=text("message"),
    )
