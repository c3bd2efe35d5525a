"""What other users of a Mooncake can do to it: fill it, press on it, change what lies in it."""

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator

from kvshare_connector.store.installation import library
from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.settings import StoreSettings
from testbed import mooncake

MIB = 1 << 20


@contextlib.contextmanager
def client(store: mooncake.Store) -> Iterator[MooncakeStore]:
    """A client of the store, beside those of the engines."""
    opened = MooncakeStore.open(StoreSettings(store.address, hostname="127.0.0.1"))
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def repeating(act: Callable[[], None], pause: float) -> Iterator[None]:
    """Do something again and again for the length of a block; an error of it ends the test."""
    over, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not over.wait(pause):
                act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
        assert not errors, errors


@contextlib.contextmanager
def full(store: mooncake.Store) -> Iterator[None]:
    """Fill every node with objects that are never evicted."""
    raw = library().MooncakeDistributedStore()
    assert raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 * MIB, "tcp", "", store.address) == 0
    config = library().ReplicateConfig()
    config.with_hard_pin = True
    number, block = 0, bytes(MIB)

    def fill() -> None:
        nonlocal number
        for size in (MIB, MIB // 16, 4096, 64):
            failures = 0
            while failures < 3:
                number += 1
                failures = failures + 1 if raw.put(f"filler/{number}", block[:size], config) else 0

    try:
        fill()
        with repeating(fill, 0.5):
            yield
    finally:
        raw.remove_by_regex("^filler/", True)
        raw.close()


@contextlib.contextmanager
def pressed(store: mooncake.Store) -> Iterator[None]:
    """Write other objects without pause, so that everything is evicted sooner or later."""
    with client(store) as other:
        number, block = 0, bytes(MIB)

        def write() -> None:
            nonlocal number
            number += 1
            other.put_bytes(f"pressure/{number}", block)

        with repeating(write, 0.01):
            yield
        other.remove_prefix("pressure/")


@contextlib.contextmanager
def changed(store: mooncake.Store, change: Callable[[bytes], bytes | None]) -> Iterator[None]:
    """Replace half of the objects, the same half every time, by what ``change`` makes of them; None leaves them."""
    seen: set[str] = set()

    def half() -> list[str]:
        stored = store.master.keys()
        return [key for key in stored if "/kfull" in key and zlib.crc32(key.encode()) % 2]

    with client(store) as other:
        before = set(half())

        def replace() -> None:
            # What is written meanwhile is read soon; what earlier traffic has left is hardly ever asked for.
            for key in sorted((key for key in half() if key not in seen), key=before.__contains__)[:60]:
                seen.add(key)
                data = other.get_bytes(key)
                new = None if data is None else change(data)
                if new is not None:
                    other.remove_many([key])
                    other.put_bytes(key, new)

        with repeating(replace, 0.1):
            yield
        other.remove_many(half())
