"""A pool as the injection sees it: read, resolved, with its revision.

Why this exists: webhook and command line get a raw object; they need one frozen value in which everything is
decided. Nothing else may live here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvshare_operator.api.pool import Spec, read_spec
from kvshare_operator.api.status import Status, read_status
from kvshare_operator.core.pool.resolve import Resolution, resolve
from kvshare_operator.core.pool.revision import revision


@dataclasses.dataclass(frozen=True)
class PoolView:
    """One pool, ready for use.

    Attributes:
        connector_image: payload image that members get.
        revision: hash over what members get.
    """

    namespace: str
    name: str
    spec: Spec
    status: Status
    resolution: Resolution
    connector_image: str
    revision: str


def connector_image(spec: Spec, status: Status, generation: int | None, default: str) -> str:
    """Choose the payload image: the spec's, else the one that the status keeps for this spec, else the default.

    It changes only with the spec, so that an upgrade of the operator does not reach pods that merely move.
    """
    if spec.connector.image is not None:
        return spec.connector.image
    if status.connector_image and (generation is None or status.observed_generation == generation):
        return status.connector_image
    return default


def view(pool: Mapping[str, Any], default_image: str) -> PoolView:
    """Read and resolve a pool object. Raises SpecError when its spec breaks the schema."""
    metadata = pool.get("metadata") or {}
    namespace, name = str(metadata.get("namespace", "default")), str(metadata.get("name", ""))
    spec = read_spec(pool.get("spec"))
    status = read_status(pool.get("status"))
    generation = metadata.get("generation")
    image = connector_image(spec, status, generation if isinstance(generation, int) else None, default_image)
    resolution = resolve(namespace, name, spec, status)
    return PoolView(
        namespace=namespace,
        name=name,
        spec=spec,
        status=status,
        resolution=resolution,
        connector_image=image,
        revision=revision(spec, resolution, image),
    )
