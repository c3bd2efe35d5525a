"""Which container of a pod runs the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.commandline.reading import Opening, looks_like_engine


def choose_container(pod: Mapping[str, Any], wanted: str | None, opening: Opening) -> int | Refusal:
    """Return the index in `spec.containers`: the named one, the only one, or the only one that runs vLLM."""
    containers = (pod.get("spec") or {}).get("containers") or []
    present = ", ".join(str(container.get("name")) for container in containers)
    if wanted is not None:
        for number, container in enumerate(containers):
            if container.get("name") == wanted:
                return number
        problem = f"there is no container {wanted!r} (containers: {present})"
        return refusal("ContainerNotFound", problem=problem)
    candidates = [number for number, one in enumerate(containers) if looks_like_engine(one, opening)]
    if len(candidates) == 1:
        return candidates[0]
    if len(candidates) > 1:
        several = ", ".join(repr(containers[number].get("name")) for number in candidates)
        return refusal("ContainerAmbiguous", containers=several)
    if len(containers) == 1:
        return 0
    return refusal("ContainerNotFound", problem=f"none of the containers ({present}) is seen to run vLLM")
