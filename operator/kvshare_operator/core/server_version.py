"""The cluster's version, and what depends on it.

Why this exists: distributions write versions in many forms (`36+`, `v1.31.4-eks-abc`), and image volumes exist
on new clusters only. Pure text and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kvshare_operator.api.reasons import Refusal, refusal

Version = tuple[int, int]
"""(major, minor)."""

IMAGE_VOLUMES_SINCE: Final[Version] = (1, 35)
"""On by default from here; 1.33 and 1.34 have them switched off unless a feature gate says otherwise."""


def read_version(answer: Mapping[str, Any]) -> Version | None:
    """Return (major, minor) of a `/version` answer; None when it cannot be read."""
    parts = [re.match(r"\d+", str(answer.get(field, ""))) for field in ("major", "minor")]
    if parts[0] is None or parts[1] is None:
        match = re.match(r"v?(\d+)\.(\d+)", str(answer.get("gitVersion", "")))
        return (int(match[1]), int(match[2])) if match else None
    return int(parts[0][0]), int(parts[1][0])


def image_volume_problem(version: Version | None) -> Refusal | None:
    """Say why image volumes cannot be used on a cluster, or None when they can."""
    if version is not None and version >= IMAGE_VOLUMES_SINCE:
        return None
    given = "an unknown version" if version is None else f"{version[0]}.{version[1]}"
    return refusal("ImageVolumeUnsupported", given=given)
