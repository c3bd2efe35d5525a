"""Pools from people's files: YAML or JSON, one object or many, a path or standard input."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import typer
import yaml

from kvshare_operator.api import names
from kvshare_operator.api.pool import Spec, read_spec
from kvshare_operator.api.status import read_status
from kvshare_operator.core.pool.plan import PlannedPool


def read_pool_file(path: str) -> dict[str, Any]:
    """Return the one KVSharePool of a file (`-` is standard input). Raises typer.BadParameter otherwise."""
    try:
        text = sys.stdin.read() if path == "-" else pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise typer.BadParameter(f"{path} cannot be read: {reason}") from error
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    pools: list[dict[str, Any]] = []
    for document in documents:
        items = document.get("items") if isinstance(document, dict) else None
        found = items if isinstance(items, list) else [document]
        pools.extend(one for one in found if isinstance(one, dict) and one.get("kind") == names.KIND)
    if len(pools) != 1:
        raise typer.BadParameter(f"{path} holds {len(pools)} objects of kind {names.KIND}, exactly one is expected")
    version = pools[0].get("apiVersion")
    if version != names.API_VERSION:
        raise typer.BadParameter(f"{path} has apiVersion {version!r}, {names.API_VERSION} is expected")
    metadata = pools[0].get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise typer.BadParameter(f"{path} has metadata {metadata!r}, a mapping with a name is expected")
    return {**pools[0], "metadata": metadata or {}}


def to_planned(pool: dict[str, Any], kv_heads: int | None) -> PlannedPool:
    """Read a pool object strictly; ``kv_heads`` fills in what the file leaves open. Raises SpecError."""
    spec = read_spec(pool.get("spec"), unknown_keys="forbid")
    metadata = pool.get("metadata") or {}
    return PlannedPool(
        spec=with_heads(spec, kv_heads),
        namespace=str(metadata.get("namespace") or "default"),
        name=str(metadata.get("name") or "unnamed"),
        status=read_status(pool.get("status")),
    )


def with_heads(spec: Spec, kv_heads: int | None) -> Spec:
    """Return the spec with the number of KV heads, unless it declares its own."""
    if kv_heads is None or spec.model.kv_heads is not None:
        return spec
    return spec.model_copy(update={"model": spec.model.model_copy(update={"kv_heads": kv_heads})})
