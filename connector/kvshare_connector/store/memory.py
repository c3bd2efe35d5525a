"""Memory: an object store in this process, with Mooncake's answers and with faults on demand.

Shipped: tests and demonstrations run the real connector against it. It reads and writes raw addresses, as the real
one does, so a wrong address is as deadly here as there.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvshare_connector.store import codes
from kvshare_connector.store.faults import Faults
from kvshare_connector.store.protocol import Segments, StoreSetupError, segments_bytes


class UnregisteredMemoryError(AssertionError):
    """A transfer was given memory that nobody registered. RDMA would read or write something else."""


@dataclass
class Contents:
    """What is stored: shared by all clients of one store.

    Attributes:
        capacity: bytes that fit, or None for no limit. A put beyond it answers ``codes.NO_SPACE``.
        objects: bytes by key, in the order in which they were stored.
        groups: store group by key.
    """

    capacity: int | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def used(self) -> int:
        """Bytes stored."""
        with self.lock:
            return sum(map(len, self.objects.values()))

    def evict(self, which: Iterable[str] | Callable[[str], bool]) -> int:
        """Drop objects by key or by a predicate, and return how many went."""
        with self.lock:
            chosen = filter(which, list(self.objects)) if callable(which) else dict.fromkeys(which)
            gone = [key for key in chosen if key in self.objects]
            for key in gone:
                del self.objects[key]
                self.groups.pop(key, None)
        return len(gone)


@dataclass
class Counts:
    """What a client was asked for, by operation, and the largest call of each."""

    calls: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    segments: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    most_keys: Counter[str] = field(default_factory=Counter)
    most_segments: Counter[str] = field(default_factory=Counter)

    def add(self, operation: str, keys: int, segments: int, size: int) -> None:
        """Count one call."""
        for counter, amount in ((self.calls, 1), (self.keys, keys), (self.segments, segments), (self.bytes, size)):
            counter[operation] += amount
        self.most_keys[operation] = max(self.most_keys[operation], keys)
        self.most_segments[operation] = max(self.most_segments[operation], segments)


class MemoryStore:
    """An ``ObjectStore`` in a dictionary.

    Attributes:
        contents: the objects, shared by all clients made with ``another_client``.
        faults: what goes wrong, for this client only.
        counts: what this client was asked for.
        assert_registered: raise ``UnregisteredMemoryError`` for memory outside the registered ranges.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        assert_registered: bool = False,
        contents: Contents | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.contents = contents if contents is not None else Contents(capacity)
        self.faults = faults if faults is not None else Faults()
        self.counts = Counts()
        self.assert_registered = assert_registered
        self._registered: dict[int, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def another_client(self) -> "MemoryStore":
        """A second client of the same store: same objects, own faults, own counts, own registered memory."""
        return MemoryStore(assert_registered=self.assert_registered, contents=self.contents)

    def evict(self, which: Iterable[str] | Callable[[str], bool]) -> int:
        """Drop objects by key or by a predicate, as an eviction would."""
        return self.contents.evict(which)

    @property
    def keys(self) -> list[str]:
        """Keys of all objects, oldest first."""
        with self.contents.lock:
            return list(self.contents.objects)

    def put_many(
        self, keys: Sequence[str], segments: Sequence[Segments], groups: Sequence[str] | None = None
    ) -> list[int]:
        """See ``ObjectStore``; an existing key answers 0 and stays as it is, the first of two equal keys wins."""
        if not self._enter("put", keys, segments):
            return [codes.CLOSED] * len(keys)
        if len(segments) != len(keys) or (groups is not None and len(groups) != len(keys)):
            return [codes.INVALID_PARAMS] * len(keys)
        return [
            self._put(key, parts, groups[i] if groups is not None else None)
            for i, (key, parts) in enumerate(zip(keys, segments, strict=True))
        ]

    def _put(self, key: str, parts: Segments, group: str | None) -> int:
        wanted = self.faults.code("put", key)
        if wanted is not None:
            return wanted
        size = segments_bytes(parts)
        if not key or not size:
            return codes.INVALID_PARAMS
        return self._keep(key, b"".join(ctypes.string_at(address, part) for address, part in parts if part), group)

    def _keep(self, key: str, data: bytes, group: str | None) -> int:
        contents = self.contents
        with contents.lock:
            if key in contents.objects:
                return codes.OK
            if contents.capacity is not None and contents.used + len(data) > contents.capacity:
                return codes.NO_SPACE
            contents.objects[key] = data
            if group is not None:
                contents.groups[key] = group
        return codes.OK

    def get_many(self, keys: Sequence[str], segments: Sequence[Segments]) -> list[int]:
        """See ``ObjectStore``; a destination smaller than the object answers -600, a larger one -800, as Mooncake."""
        if not self._enter("get", keys, segments):
            return [codes.CLOSED] * len(keys)
        if len(segments) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        last = {key: i for i, key in enumerate(keys)} if self.faults.duplicates_fill_last else {}
        return [
            self._get(key, parts, fill=last.get(key, i) == i)
            for i, (key, parts) in enumerate(zip(keys, segments, strict=True))
        ]

    def _get(self, key: str, parts: Segments, *, fill: bool) -> int:
        wanted = self.faults.code("get", key)
        if wanted is not None:
            return wanted
        with self.contents.lock:
            data = self.contents.objects.get(key)
        if data is None:
            return codes.NOT_FOUND
        size = segments_bytes(parts)
        if size != len(data):
            return codes.INVALID_PARAMS if size < len(data) else codes.TRANSFER_FAIL
        end = max(0, size - self.faults.missing(key))
        position = 0
        for address, part in parts:
            taken = data[position : min(position + part, end)]
            if fill and taken:
                ctypes.memmove(address, taken, len(taken))
            position += part
        return end

    def exists_many(self, keys: Sequence[str]) -> list[int]:
        """See ``ObjectStore``."""
        if not self._enter("exists", keys, ()):
            return [codes.CLOSED] * len(keys)
        out: list[int] = []
        for key in keys:
            wanted = self.faults.code("exists", key)
            with self.contents.lock:
                out.append(int(key in self.contents.objects) if wanted is None else wanted)
        return out

    def remove_many(self, keys: Sequence[str]) -> list[int]:
        """See ``ObjectStore``."""
        if not self._enter("remove", keys, ()):
            return [codes.CLOSED] * len(keys)
        out: list[int] = []
        for key in keys:
            wanted = self.faults.code("remove", key)
            if wanted is None:
                wanted = codes.OK if self.contents.evict([key]) else codes.NOT_FOUND
            out.append(wanted)
        return out

    def remove_prefix(self, prefix: str) -> int:
        """See ``ObjectStore``."""
        if not self._enter("remove", [prefix], ()):
            return codes.CLOSED
        wanted = self.faults.code("remove", prefix)
        return self.contents.evict(lambda key: key.startswith(prefix)) if wanted is None else wanted

    def put_bytes(self, key: str, data: bytes) -> int:
        """See ``ObjectStore``."""
        if not self._enter("put", [key], ()):
            return codes.CLOSED
        wanted = self.faults.code("put", key)
        if wanted is not None:
            return wanted
        return self._keep(key, bytes(data), None) if key and data else codes.INVALID_PARAMS

    def get_bytes(self, key: str) -> bytes | None:
        """See ``ObjectStore``."""
        if not self._enter("get", [key], ()) or self.faults.code("get", key) is not None:
            return None
        with self.contents.lock:
            return self.contents.objects.get(key)

    def register(self, address: int, size: int) -> None:
        """See ``ObjectStore``; overlapping ranges are refused, as Mooncake refuses them."""
        with self._lock:
            if self._closed:
                raise StoreSetupError(f"{size} bytes at {address:#x} given to a closed store: open it first")
            if size < 1 or any(address < start + n and start < address + size for start, n in self._registered.items()):
                raise StoreSetupError(
                    f"{size} bytes at {address:#x} given, code {codes.INVALID_PARAMS}, at least one byte outside all "
                    "registered ranges expected: register every range once"
                )
            self._registered[address] = size

    def unregister(self, address: int) -> None:
        """See ``ObjectStore``."""
        with self._lock:
            if self._closed:
                return
            if self._registered.pop(address, None) is None:
                raise StoreSetupError(
                    f"address {address:#x} given, code {codes.INVALID_PARAMS}, the start of a registered range expected"
                )

    def close(self) -> None:
        """See ``ObjectStore``; the objects stay, other clients may hold them."""
        with self._lock:
            self._closed = True
            self._registered.clear()

    def _enter(self, operation: str, keys: Sequence[str], segments: Sequence[Segments]) -> bool:
        """Count a call and let the faults act; False when the client is closed."""
        with self._lock:
            if self._closed:
                return False
            self.counts.add(operation, len(keys), sum(map(len, segments)), sum(map(segments_bytes, segments)))
            ranges = dict(self._registered) if self.assert_registered else None
        if ranges is not None:
            for address, size in (part for parts in segments for part in parts):
                if not any(start <= address and address + size <= start + n for start, n in ranges.items()):
                    raise UnregisteredMemoryError(f"{operation} of {size} bytes at {address:#x}: not registered")
        self.faults.enter(operation, keys)
        with self._lock:
            return not self._closed
