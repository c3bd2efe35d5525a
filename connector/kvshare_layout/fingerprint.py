"""Fingerprint: one digest of everything that changes the bytes of a cache or the meaning of a key.

Pure: canonical JSON, SHA-256, and the names of the fields in which two manifests differ. Which facts enter is decided
in ``verdict``. TP size, rank, data-parallel size and physical layout never do.
"""

import hashlib
import json
from collections.abc import Mapping

#: Hex digits of a fingerprint in keys: 128 bits.
DIGITS = 32


def canonical_json(fields: Mapping[str, object]) -> bytes:
    """The same bytes for equal fields, whatever their order and whatever process wrote them."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def fingerprint(fields: Mapping[str, object]) -> str:
    """Hex digest of ``fields``."""
    return hashlib.sha256(canonical_json(fields)).hexdigest()[:DIGITS]


def flatten(fields: Mapping[str, object]) -> dict[str, str]:
    """``{"a": {"b": 1}}`` as ``{"a.b": "1"}``: one line of text for every leaf, for people and for status fields."""
    out: dict[str, str] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            out.update({f"{name}.{key}": text for key, text in flatten(value).items()})
        else:
            out[name] = value if isinstance(value, str) else canonical_json({"": value})[4:-1].decode()
    return out


def differing_fields(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the fields that two flattened manifests disagree about, or that only one of them has."""
    return tuple(sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name)))
