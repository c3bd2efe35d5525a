"""Seals: a digest behind every object, with which a load proves its content and whose content it is.

BLAKE3 of the key and the bytes, 128 bits of it. Several GB/s on one core, and vLLM itself needs the package, so every
image with an engine has it. The key is part of it: a store that answers with another object's bytes, whole and sound,
is found as well. It guards against accidents; who may write into a pool can seal what they write.
"""

import torch

from kvshare_layout.objects import SEAL_BYTES


def seal(key: str, slot: torch.Tensor, size: int) -> None:
    """Write the digest behind the first ``size`` bytes of ``slot`` (uint8, host memory, dense)."""
    slot[size : size + SEAL_BYTES] = torch.frombuffer(bytearray(_digest(key, slot, size)), dtype=torch.uint8)


def sealed(key: str, slot: torch.Tensor, size: int) -> bool:
    """Whether the digest behind the first ``size`` bytes of ``slot`` is theirs, under this key."""
    return bytes(slot[size : size + SEAL_BYTES].numpy()) == _digest(key, slot, size)


def _digest(key: str, slot: torch.Tensor, size: int) -> bytes:
    from blake3 import blake3  # here, because a rank that seals nothing needs torch alone

    # A byte that no key has ends the key, so that no key and bytes are another key's and bytes.
    digest = blake3(key.encode() + b"\0")
    digest.update(slot[:size].numpy())
    return bytes(digest.digest(length=SEAL_BYTES))
