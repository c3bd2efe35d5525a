"""The JSON patch between a pod and the same pod with additions.

Why this exists: the injection builds a whole new pod, which is easy to test; the API server wants a patch.
The difference is only ever additions and replaced strings, so the whole of RFC 6902 is not needed. A removal
would be a fault of ours and raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Operation = dict[str, Any]


def difference(before: Any, after: Any, path: str = "") -> list[Operation]:
    """Return the operations that turn ``before`` into ``after``. Raises ValueError if something would go away."""
    if before == after:
        return []
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        if missing := before.keys() - after.keys():
            raise ValueError(f"{path}: {sorted(missing)} would be removed")
        operations = []
        for key, value in after.items():
            where = f"{path}/{_escaped(key)}"
            if key in before:
                operations.extend(difference(before[key], value, where))
            else:
                operations.append({"op": "add", "path": where, "value": value})
        return operations
    if isinstance(before, list) and isinstance(after, list):
        if len(after) < len(before):
            raise ValueError(f"{path}: {len(before) - len(after)} element(s) would be removed")
        operations = []
        for number, value in enumerate(after):
            if number < len(before):
                operations.extend(difference(before[number], value, f"{path}/{number}"))
            else:
                operations.append({"op": "add", "path": f"{path}/-", "value": value})
        return operations
    return [{"op": "replace" if before is not None else "add", "path": path, "value": after}]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
