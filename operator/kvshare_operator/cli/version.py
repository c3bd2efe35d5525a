"""Which KVShare this is."""

from __future__ import annotations

from importlib import metadata


def own_version() -> str:
    """Return the version of this command."""
    try:
        return metadata.version("kvshare")
    except metadata.PackageNotFoundError:
        return "not known"
