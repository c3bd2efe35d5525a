"""Protocol: the narrow edge between the connector and any object store.

May live here: the interface, its errors and the checks that every implementation shares. Knows nothing of Mooncake,
tensors or engines: memory is addresses and byte counts, results are numbers (``codes`` says what each one means).
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

#: Memory of one object: (address, bytes) pairs, in the order of the object's bytes.
Segments = Sequence[tuple[int, int]]


class StoreError(Exception):
    """Root of the errors of the store edge. Trouble during transfers is never raised, it is a code per key."""


class StoreUnavailable(StoreError):  # noqa: N818
    """The store's client library is missing, does not fit, or could not be started. The engine serves without it."""


class StoreSetupError(StoreError):
    """Memory that could not be registered: a start-up error, the text names size, code and remedy."""


def segments_bytes(segments: Segments) -> int:
    """Bytes of all segments together: what a GET of exactly this object returns."""
    return sum(size for _, size in segments)


@runtime_checkable
class ObjectStore(Protocol):
    """Batches of whole objects by key.

    Every list that is returned has one number per key, in the order of the keys. Transfer calls never raise for store
    trouble and never crash on a closed client; they answer with negative codes. All methods may be called from any
    thread.
    """

    def put_many(
        self, keys: Sequence[str], segments: Sequence[Segments], groups: Sequence[str] | None = None
    ) -> list[int]:
        """Store objects: 0 or a negative code per key.

        0 does not prove that these bytes are readable: an existing key stays as it is, whatever its size.

        Args:
            keys: keys of the objects.
            segments: where the bytes of each object are.
            groups: store group of each object; members of a group share leases where the store supports it.
        """
        ...

    def get_many(self, keys: Sequence[str], segments: Sequence[Segments]) -> list[int]:
        """Read objects: bytes read or a negative code per key.

        A number is a success only when it equals ``segments_bytes`` of its segments; the caller compares. The same key
        may occur several times, every destination is filled.
        """
        ...

    def exists_many(self, keys: Sequence[str]) -> list[int]:
        """Ask for objects: 1, 0 or a negative code per key. Renews the leases of what it finds."""
        ...

    def remove_many(self, keys: Sequence[str]) -> list[int]:
        """Remove objects although they may be leased: 0 or a negative code per key."""
        ...

    def remove_prefix(self, prefix: str) -> int:
        """Remove every object whose key starts with ``prefix``, leased or not: how many went, or a negative code."""
        ...

    def put_bytes(self, key: str, data: bytes) -> int:
        """Store one small object: 0 or a negative code. An existing key stays as it is."""
        ...

    def get_bytes(self, key: str) -> bytes | None:
        """Read one small object; None when it is missing or cannot be read."""
        ...

    def register(self, address: int, size: int) -> None:
        """Make memory known to the transport.

        Raises:
            StoreSetupError: naming size, code and remedy.
        """
        ...

    def unregister(self, address: int) -> None:
        """Take back what was registered at ``address``.

        Raises:
            StoreSetupError: nothing is registered there, or the transport refuses.
        """
        ...

    def close(self) -> None:
        """Close the client; may be called again. Afterwards every call answers ``codes.CLOSED``."""
        ...
