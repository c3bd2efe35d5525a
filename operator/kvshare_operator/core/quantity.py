"""Kubernetes quantities of memory: text to bytes, and bytes to the text that the API server would store.

Why this exists: a quantity that is written in another form than the server's own never compares equal to
what is stored, and the controller would write it again for ever.
"""

from __future__ import annotations

import decimal
import re
from typing import Final

MIB: Final = 2**20
_UNITS: Final[dict[str, int]] = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_FORM: Final = re.compile(r"\+?(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,3})|(Ki|Mi|Gi|Ti|Pi|Ei|[kMGTPE]|))")


def bytes_of(quantity: str) -> int:
    """Return a quantity (`256Mi`, `1G`, `1.5Gi`, `1e9`) in bytes, rounded up. Raises ValueError otherwise."""
    match = _FORM.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} given, a quantity such as 256Mi expected")
    number, exponent, unit = match.groups()
    scale = decimal.Decimal(10) ** int(exponent) if exponent else decimal.Decimal(_UNITS[unit or ""])
    return int((decimal.Decimal(number) * scale).to_integral_value(decimal.ROUND_CEILING))


def as_quantity(size: int) -> str:
    """Return whole MiB as Kubernetes itself writes them: the largest binary unit without a fraction."""
    if size < 0 or size % MIB:
        raise ValueError(f"{size} bytes given, whole MiB expected")
    value = size // MIB
    for unit in ("Mi", "Gi", "Ti", "Pi"):
        if unit == "Pi" or value % 1024 or value == 0:
            return f"{value}{unit}"
        value //= 1024
    raise AssertionError("unreachable")
