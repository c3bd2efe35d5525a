"""Client: the rank's connection to the store, opened and kept in the background.

A store that is not there costs loads and saves, never a step. Memory that cannot be registered is different: it is a
start-up error, because RDMA would silently read or write something else.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from kvshare_connector.lines import Rarely
from kvshare_connector.store.protocol import ObjectStore, StoreError, StoreSetupError

logger = logging.getLogger(__name__)

#: Seconds between two attempts to open the store.
REOPEN_SECONDS = 5.0
#: What is said while there is no store.
AWAY = "blocks cannot be loaded or saved yet, the store is tried again every 5 s: %s"
RAISED = "opening the store for blocks raised, it is tried again: please report it"
#: Seconds that closing waits for calls that hang.
CLOSE_SECONDS = 2.0


class StoreClient:
    """Opens a store and registers a rank's memory with it.

    Args:
        open_store: opens the client; raises ``StoreError`` when it cannot.
        buffers: memory to register, ``(address, bytes)``.
    """

    def __init__(self, open_store: Callable[[], ObjectStore], buffers: Sequence[tuple[int, int]]) -> None:
        self._open_store, self._buffers = open_store, list(buffers)
        self._store: ObjectStore | None = None
        self._error: StoreSetupError | None = None
        self._first_attempt, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvshare-client", daemon=True)
        self._thread.start()

    def current(self) -> ObjectStore | None:
        """The client, or None while there is none."""
        return self._store

    def check(self, seconds: float) -> None:
        """Wait for the first attempt, at most ``seconds``.

        Raises:
            StoreSetupError: the memory could not be registered.
        """
        self._first_attempt.wait(seconds)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the client. One whose calls hang closes itself once they end, or dies with the process."""
        self._closing.set()
        self._thread.join(timeout=CLOSE_SECONDS)
        store, self._store = self._store, None
        if store is not None:
            closer = threading.Thread(target=store.close, name="kvshare-close", daemon=True)
            closer.start()
            closer.join(timeout=CLOSE_SECONDS)

    def _run(self) -> None:
        rarely = Rarely(logger)
        while not self._closing.is_set():
            opened: ObjectStore | None = None
            try:
                opened = self._open_store()
                for address, size in self._buffers:
                    opened.register(address, size)
                if self._closing.is_set():
                    opened.close()
                else:
                    self._store = opened
                    if rarely.over(AWAY, RAISED):
                        logger.info("the store is connected now, blocks are loaded and saved")
                return
            except StoreSetupError as error:
                logger.error("%s", error)
                self._error = error
                if opened is not None:
                    opened.close()
                return
            except StoreError as error:
                rarely.warning(AWAY, error)
            except Exception:
                rarely.exception(RAISED)
            finally:
                self._first_attempt.set()
            self._closing.wait(REOPEN_SECONDS)
