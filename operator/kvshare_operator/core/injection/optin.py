"""What a pod's author asked for, read from annotations and labels.

Why this exists: annotations are free text; this is the one place that turns them into values or into a
refusal that names all allowed ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.pool.groups import is_worker

ROLES: Final = ("prefill", "decode", "both")
_DEVICES: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}([,/][A-Za-z0-9][A-Za-z0-9_.-]{0,63}){0,127}")
_SIZE: Final = re.compile(r"0{0,4}[1-9][0-9]{0,3}")
_MOST_RANKS: Final = 1024
_MIRROR: Final = "kubernetes.io/config.mirror"
USER_ANNOTATIONS: Final = frozenset({
    names.POOL, names.ROLE, names.CONTAINER, names.TENSOR_PARALLEL_SIZE, names.ENTRYPOINT, names.IMAGE_PYTHONPATH,
    names.NETWORK_DEVICES,
})  # fmt: skip
"""What people write on pods."""
_KNOWN: Final = USER_ANNOTATIONS | {names.INJECTED, names.REPORT_CA}


@dataclasses.dataclass(frozen=True)
class OptIn:
    """The wish: which pool, in which role, and what cannot be read from the command line.

    ``network_devices`` is empty for `auto`.
    """

    pool: str
    role: str = "both"
    container: str | None = None
    tensor_parallel_size: int | None = None
    forwards_args: bool = False
    image_pythonpath: str | None = None
    group_worker: bool = False
    network_devices: str = ""


def wanted_pool(pod: Mapping[str, Any]) -> str | None:
    """Return the pool that a pod asks for; None for pods that are none of our business (mirror pods too)."""
    annotations = _strings(pod, "annotations")
    if _MIRROR in annotations:
        return None
    return annotations.get(names.POOL) or None


def read_opt_in(pod: Mapping[str, Any]) -> OptIn | Refusal:
    """Read all opt-in annotations of a pod that has `kvshare.dev/pool`."""
    annotations = _strings(pod, "annotations")
    role = annotations.get(names.ROLE, "both")
    if role not in ROLES:
        return refusal("RoleInvalid", given=role)
    size: int | None = None
    if (text := annotations.get(names.TENSOR_PARALLEL_SIZE)) is not None:
        if _SIZE.fullmatch(text) is None or int(text) > _MOST_RANKS:
            expected = "a whole number from 1 to 1024"
            return refusal("AnnotationInvalid", annotation=names.TENSOR_PARALLEL_SIZE, given=text, expected=expected)
        size = int(text)
    entrypoint = annotations.get(names.ENTRYPOINT)
    if entrypoint not in (None, "forwards-args"):
        return refusal("AnnotationInvalid", annotation=names.ENTRYPOINT, given=entrypoint, expected="forwards-args")
    devices = "".join(annotations.get(names.NETWORK_DEVICES, "auto").split())
    if _DEVICES.fullmatch(devices) is None:
        expected = "auto, a list such as mlx5_0,mlx5_1, or one list for each rank such as mlx5_0/mlx5_1"
        given = annotations[names.NETWORK_DEVICES]
        return refusal("AnnotationInvalid", annotation=names.NETWORK_DEVICES, given=given, expected=expected)
    return OptIn(
        pool=annotations[names.POOL],
        role=role,
        container=annotations.get(names.CONTAINER) or None,
        tensor_parallel_size=size,
        forwards_args=entrypoint is not None,
        image_pythonpath=annotations.get(names.IMAGE_PYTHONPATH) or None,
        network_devices="" if devices.lower() == "auto" else devices,
        group_worker=is_worker(_strings(pod, "labels")),
    )


def misspelled(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for every annotation of a pod that begins like ours and is none of them."""
    sentences = []
    for name in sorted(_strings(pod, "annotations")):
        if name.startswith(f"{names.GROUP}/") and name not in _KNOWN:
            meant = difflib.get_close_matches(name, sorted(USER_ANNOTATIONS), 1) or sorted(USER_ANNOTATIONS)
            sentences.append(f"annotation {name} is not known and has no effect; {' or '.join(meant)} expected")
    return tuple(sentences)


def _strings(pod: Mapping[str, Any], field: str) -> dict[str, str]:
    found = (pod.get("metadata") or {}).get(field) or {}
    return {str(key): str(value) for key, value in found.items()}
