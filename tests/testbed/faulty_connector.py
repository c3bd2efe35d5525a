"""The real connector with a store edge that misbehaves on demand: what vLLM loads in fault trials.

``kv_connector`` is ``FaultyConnector``, ``kv_connector_module_path`` is ``testbed.faulty_connector``.
Everything below the edge is a real Mooncake. A file named by ``FAULTS`` says what goes wrong, and may change at any
time: ``write_faults`` on the test's side, ``Switch`` on the engine's.
"""

import ctypes
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvshare_connector.connector import KVShareConnector
from kvshare_connector.store.protocol import ObjectStore, Segments, segments_bytes

#: Environment variable that names the file.
FAULTS = "KVSHARE_TRIAL_FAULTS"
#: What a short read leaves in the bytes that did not arrive.
GARBAGE = 0xA5
MISSING_BYTES = 64


@dataclass(frozen=True)
class FaultSettings:
    """What goes wrong. Shares are of calls, 0 to 1.

    Attributes:
        removed: share of GETs whose keys are removed from the store at the last moment.
        short: share of GETs in which one object arrives without its last bytes.
        get_seconds: how long every GET waits first.
        put_seconds: how long every PUT waits first.
    """

    removed: float = 0
    short: float = 0
    get_seconds: float = 0
    put_seconds: float = 0


def write_faults(path: Path, faults: FaultSettings) -> None:
    """Let it go wrong from now on, at once and in one piece."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(faults)))
    unfinished.rename(path)


class Switch:
    """The file as the engine sees it."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen, self._now = path, 0, FaultSettings()

    def now(self) -> FaultSettings:
        """What goes wrong now."""
        try:
            changed = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return self._now
        if changed != self._seen:
            self._seen, self._now = changed, FaultSettings(**json.loads(self._path.read_text()))
        return self._now


class FaultyStore:
    """A store that does what the file says; everything else goes to ``inner`` unchanged."""

    def __init__(self, inner: ObjectStore, switch: Switch) -> None:
        self._inner, self._switch, self._dice = inner, switch, random.Random(1)
        self._owed: dict[str, float] = {}

    def _turn(self, fault: str, share: float) -> bool:
        """Whether it is this call's turn: evenly ``share`` of all calls from the first one on, however few they are."""
        owed = self._owed.get(fault, 1 - share) + share
        self._owed[fault] = owed - (owed >= 1)
        return share > 0 and owed >= 1

    def put_many(
        self, keys: Sequence[str], segments: Sequence[Segments], groups: Sequence[str] | None = None
    ) -> list[int]:
        """See ``ObjectStore``."""
        time.sleep(self._switch.now().put_seconds)
        return self._inner.put_many(keys, segments, groups)

    def get_many(self, keys: Sequence[str], segments: Sequence[Segments]) -> list[int]:
        """See ``ObjectStore``."""
        faults = self._switch.now()
        time.sleep(faults.get_seconds)
        if self._turn("removed", faults.removed):
            self._inner.remove_many(keys)
        results = list(self._inner.get_many(keys, segments))
        if results and self._turn("short", faults.short):
            number = self._dice.randrange(len(results))
            if results[number] == segments_bytes(segments[number]):
                address, size = segments[number][-1]
                missing = min(size, MISSING_BYTES)
                ctypes.memset(address + size - missing, GARBAGE, missing)
                results[number] -= missing
        return results

    def exists_many(self, keys: Sequence[str]) -> list[int]:
        """See ``ObjectStore``."""
        return self._inner.exists_many(keys)

    def remove_many(self, keys: Sequence[str]) -> list[int]:
        """See ``ObjectStore``."""
        return self._inner.remove_many(keys)

    def remove_prefix(self, prefix: str) -> int:
        """See ``ObjectStore``."""
        return self._inner.remove_prefix(prefix)

    def put_bytes(self, key: str, data: bytes) -> int:
        """See ``ObjectStore``."""
        return self._inner.put_bytes(key, data)

    def get_bytes(self, key: str) -> bytes | None:
        """See ``ObjectStore``."""
        return self._inner.get_bytes(key)

    def register(self, address: int, size: int) -> None:
        """See ``ObjectStore``."""
        self._inner.register(address, size)

    def unregister(self, address: int) -> None:
        """See ``ObjectStore``."""
        self._inner.unregister(address)

    def close(self) -> None:
        """See ``ObjectStore``."""
        self._inner.close()


class FaultyConnector(KVShareConnector):
    """The connector on a ``FaultyStore``; the client of lookups stays as it is."""

    def _open_store(self) -> ObjectStore:
        return FaultyStore(super()._open_store(), Switch(Path(os.environ[FAULTS])))
