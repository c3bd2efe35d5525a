"""An API server in memory, for tests and trials: objects by path, a log of calls, faults on demand.

Why this exists: the edge's interface is narrow enough to have a second implementation. It stores what is
written, merges patches as deeply as the operator relies on, and raises the same errors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvshare_operator.edges.cluster_api import ApiError

Json = dict[str, Any]


class MemoryClusterApi:
    """Objects by path.

    Attributes:
        objects: path of one object -> the object.
        calls: (method, path) in order.
        faults: path -> error to raise instead of answering.
    """

    def __init__(self, objects: Mapping[str, Json] | None = None) -> None:
        self.objects: dict[str, Json] = copy.deepcopy(dict(objects or {}))
        self.calls: list[tuple[str, str]] = []
        self.faults: dict[str, ApiError] = {}
        self.answers: dict[str, Json] = {"/version": {"major": "1", "minor": "36"}}

    @property
    def writes(self) -> list[tuple[str, str]]:
        """All calls that change something."""
        return [call for call in self.calls if call[0] != "GET"]

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,  # noqa: ARG002 - part of the interface
        body: Json | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",  # noqa: ARG002 - part of the interface
    ) -> Json:
        """Answer one call from memory. Raises ApiError."""
        self.calls.append((method, path))
        if path in self.faults:
            raise self.faults[path]
        if path in self.answers:
            return copy.deepcopy(self.answers[path])
        if method == "GET":
            return self._get(path)
        target = path.removesuffix("/status")
        if method == "POST":
            self.objects[f"{path}/{(body or {}).get('metadata', {}).get('name', 'new')}"] = copy.deepcopy(body or {})
            return body or {}
        if target not in self.objects and content_type != "application/apply-patch+yaml":
            raise ApiError(404, f"{target} not found")
        self.objects[target] = _merged(self.objects.get(target, {}), body or {})
        return copy.deepcopy(self.objects[target])

    def _get(self, path: str) -> Json:
        if path in self.objects:
            return copy.deepcopy(self.objects[path])
        below = [
            copy.deepcopy(one)
            for key, one in sorted(self.objects.items())
            if key.startswith(f"{path}/") or _listed(path, key)
        ]
        if below or path.rsplit("/", 1)[1] in ("pods", "kvsharepools"):
            return {"items": below, "metadata": {}}
        raise ApiError(404, f"{path} not found")


def _listed(path: str, key: str) -> bool:
    """Whether an object's path belongs to a list over all namespaces."""
    prefix, plural = path.rsplit("/", 1)
    parts = key.split("/")
    return key.startswith(f"{prefix}/namespaces/") and len(parts) > 2 and parts[-2] == plural


def _merged(present: Any, patch: Any) -> Any:
    if isinstance(present, dict) and isinstance(patch, dict):
        return {**present, **{key: _merged(present.get(key), value) for key, value in patch.items()}}
    if (
        isinstance(present, list)
        and isinstance(patch, list)
        and all(isinstance(one, dict) and ("type" in one or "name" in one) for one in (*present, *patch))
    ):
        by_key = {one.get("type", one.get("name")): one for one in present}
        for one in patch:
            name = one.get("type", one.get("name"))
            by_key[name] = _merged(by_key.get(name), one)
        return list(by_key.values())
    return copy.deepcopy(patch)
