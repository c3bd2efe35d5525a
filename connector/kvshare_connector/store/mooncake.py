"""Mooncake: the only file that imports Mooncake; an ``ObjectStore`` on top of its client.

May live here: opening, guarding, batching, replacing a client. Mooncake's client ends the process when it is used
before ``setup`` or after ``close``, loses a destination when a key comes twice in one GET, and may wedge for good when
too many segments are in flight. None of that passes this file.
"""

import importlib
import importlib.metadata
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare_connector.lines import Rarely
from kvshare_connector.store import codes
from kvshare_connector.store.batches import MOST_NAMES, InFlight, cut, rounds_without_repeats
from kvshare_connector.store.codes import Reaction
from kvshare_connector.store.protocol import Segments, StoreSetupError, StoreUnavailable, segments_bytes
from kvshare_connector.store.settings import StoreSettings, local_hostname, reachable, set_environment
from kvshare_connector.store.suspicion import Suspicion

log = logging.getLogger(__name__)

NEEDED = "mooncake-transfer-engine 0.3.13 or newer"
_METHODS = (
    "batch_get_into_multi_buffers", "batch_is_exist", "batch_put_from_multi_buffers", "batch_remove", "close", "get",
    "put", "register_buffer", "remove_by_regex", "setup", "unregister_buffer",
)  # fmt: skip
#: A call that failed at once is tried once more; one that has already waited this long is not.
_RETRY_BEFORE_SECONDS = 1.0
_NO_SPACE_PAUSE_SECONDS = 0.05
#: How long closing waits for calls that other threads still have inside Mooncake.
_CLOSE_WAIT_SECONDS = 70.0


def installed() -> str:
    """Name and version of the installed Mooncake distribution, or ``nothing``."""
    try:
        names = importlib.metadata.packages_distributions().get("mooncake", [])
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in dict.fromkeys(names)) or "nothing"
    except importlib.metadata.PackageNotFoundError:
        return "nothing"


def _library() -> Any:
    """Mooncake's store module.

    Raises:
        StoreUnavailable: missing, cannot be loaded, or lacks a method that is needed.
    """
    try:
        library = importlib.import_module("mooncake.store")
        client = library.MooncakeDistributedStore
        lacking = [name for name in _METHODS if not hasattr(client, name)]
        config = library.ReplicateConfig
    except Exception as error:  # a native module may fail in any way, and none may stop an engine
        raise StoreUnavailable(
            f"{installed()} installed, {NEEDED} needed: install it in the image ({type(error).__name__}: {error})"
        ) from error
    if lacking or config is None:
        raise StoreUnavailable(f"{installed()} installed without {', '.join(lacking)}, {NEEDED} needed: upgrade it")
    return library


def library_problem() -> str:
    """Why Mooncake cannot be used in this image, one sentence, or an empty string."""
    try:
        _library()
    except StoreUnavailable as error:
        return str(error)
    return ""


@dataclass
class _Client:
    """A set-up client, and how many calls are inside it."""

    raw: Any
    inside: int = 0


class MooncakeStore:
    """A client of a Mooncake store. Make it with ``open``; all methods may be called from any thread."""

    def __init__(self, settings: StoreSettings, library: Any, raw: Any) -> None:
        self.settings = settings
        self.reopened = 0
        self._library = library
        self._client: _Client | None = _Client(raw)
        self._changed = threading.Condition()
        self._in_flight = InFlight()
        # Held while ranges are registered, and while a new client that knows them all takes over.
        self._registering = threading.Lock()
        self._registered: dict[int, int] = {}
        self._suspicion = Suspicion()
        self._rarely = Rarely(log)
        self._reopening = False

    @classmethod
    def open(cls, settings: StoreSettings) -> "MooncakeStore":
        """Load Mooncake and set a client up; takes ``settings.setup_seconds`` and one attempt (4 s) at most.

        Raises:
            StoreUnavailable: Mooncake is missing or does not fit, or the master does not answer; one sentence.
        """
        set_environment(settings)
        library = _library()
        return cls(settings, library, _set_up(library, settings))

    def put_many(
        self, keys: Sequence[str], segments: Sequence[Segments], groups: Sequence[str] | None = None
    ) -> list[int]:
        """See ``ObjectStore``; Mooncake itself calls an existing key of any size a success."""
        if groups is not None and len(groups) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)

        def call(raw: Any, batch: Sequence[int]) -> Any:
            config = self._library.ReplicateConfig()
            if groups is not None and hasattr(config, "group_ids"):
                config.group_ids = [groups[i] for i in batch]
            return raw.batch_put_from_multi_buffers(*_lists(keys, segments, batch), config)

        return self._transfer(keys, segments, [list(range(len(keys)))], call, writes=True)

    def get_many(self, keys: Sequence[str], segments: Sequence[Segments]) -> list[int]:
        """See ``ObjectStore``; equal keys go into different calls, because Mooncake fills one of them only."""
        return self._transfer(
            keys,
            segments,
            list(rounds_without_repeats(keys)),
            lambda raw, batch: raw.batch_get_into_multi_buffers(*_lists(keys, segments, batch)),
            writes=False,
        )

    def exists_many(self, keys: Sequence[str]) -> list[int]:
        """See ``ObjectStore``."""
        return self._by_name(keys, lambda raw, names: raw.batch_is_exist(names))

    def remove_many(self, keys: Sequence[str]) -> list[int]:
        """See ``ObjectStore``."""
        return self._by_name(keys, lambda raw, names: raw.batch_remove(names, True))

    def remove_prefix(self, prefix: str) -> int:
        """See ``ObjectStore``."""
        if not prefix:
            return codes.INVALID_PARAMS
        return self._call(1, lambda raw: [raw.remove_by_regex("^" + re.escape(prefix), True)])[0]

    def put_bytes(self, key: str, data: bytes) -> int:
        """See ``ObjectStore``."""
        if not key or not data:
            return codes.INVALID_PARAMS
        return self._call(1, lambda raw: [raw.put(key, bytes(data))])[0]

    def get_bytes(self, key: str) -> bytes | None:
        """See ``ObjectStore``."""
        found: list[bytes] = []

        def call(raw: Any) -> list[int]:
            found.append(raw.get(key))
            return [codes.OK]

        return found[0] if self._call(1, call)[0] == codes.OK and found[0] else None

    def register(self, address: int, size: int) -> None:
        """See ``ObjectStore``. What is registered is registered again with a client that replaces this one."""
        with self._registering:
            code = self._call(1, lambda raw: [raw.register_buffer(address, size)])[0]
            if code == codes.OK:
                self._registered[address] = size
        if code != codes.OK:
            meaning = codes.explain(code)
            raise StoreSetupError(
                f"registering {size} bytes at {address:#x} with Mooncake over {self.settings.protocol} given, code "
                f"{code} ({meaning.name}): register every range once, and with rdma raise the limit of locked memory "
                "(ulimit -l, capability IPC_LOCK)"
            )

    def unregister(self, address: int) -> None:
        """See ``ObjectStore``. Nothing happens on a closed client: closing has unregistered everything."""
        with self._registering:
            known = self._registered.pop(address, None)
            code = self._call(1, lambda raw: [raw.unregister_buffer(address)])[0]
        if known is None and code != codes.CLOSED:
            code = codes.INVALID_PARAMS
        if code not in (codes.OK, codes.CLOSED):
            raise StoreSetupError(f"address {address:#x} given, code {code}, the start of a registered range expected")

    def close(self) -> None:
        """See ``ObjectStore``; waits for calls of other threads, which Mooncake would not survive.

        Mooncake holds the interpreter lock for the second that closing takes.
        """
        with self._changed:
            client, self._client = self._client, None
        if client is not None:
            self._retire(client)

    def _transfer(
        self,
        keys: Sequence[str],
        segments: Sequence[Segments],
        rounds: Sequence[Sequence[int]],
        call: Callable[[Any, Sequence[int]], Any],
        *,
        writes: bool,
    ) -> list[int]:
        if len(segments) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        results = [codes.INVALID_PARAMS] * len(keys)
        counts = [len(parts) for parts in segments]
        for indices in rounds:
            # Mooncake takes a null pointer and an empty object without a word.
            good = [
                i
                for i in indices
                if keys[i] and segments_bytes(segments[i]) and all(a or not n for a, n in segments[i])
            ]
            for batch in cut(good, counts):
                with self._in_flight.room(sum(counts[i] for i in batch)):
                    answers = self._with_retry(batch, call)
                for i, answer in zip(batch, answers, strict=True):
                    results[i] = answer
                self._watch([keys[i] for i in batch], answers, writes=writes)
        return results

    def _with_retry(self, batch: Sequence[int], call: Callable[[Any, Sequence[int]], Any]) -> list[int]:
        """One call, and one more for what may succeed at once: a reconnecting client, a store that is evicting."""
        started = time.monotonic()
        answers = self._call(len(batch), lambda raw: call(raw, batch))
        again = [n for n, code in enumerate(answers) if codes.explain(code).reaction is Reaction.RETRY]
        if not again or time.monotonic() - started > _RETRY_BEFORE_SECONDS:
            return answers
        if any(answers[n] == codes.NO_SPACE for n in again):
            time.sleep(_NO_SPACE_PAUSE_SECONDS)
        for n, code in zip(
            again, self._call(len(again), lambda raw: call(raw, [batch[n] for n in again])), strict=True
        ):
            answers[n] = code
        return answers

    def _by_name(self, keys: Sequence[str], call: Callable[[Any, list[str]], Any]) -> list[int]:
        def ask(raw: Any, batch: Sequence[int]) -> Any:
            return call(raw, [keys[i] for i in batch])

        results: list[int] = []
        for start in range(0, len(keys), MOST_NAMES):
            results += self._with_retry(range(start, min(start + MOST_NAMES, len(keys))), ask)
        return results

    def _call(self, count: int, call: Callable[[Any], Any]) -> list[int]:
        """Run one call on the current client; a list of ``count`` numbers, whatever happens."""
        with self._changed:
            client = self._client
            if client is None:
                return [codes.CLOSED] * count
            client.inside += 1
        try:
            answers = [int(code) for code in call(client.raw)]
        except Exception:
            self._rarely.exception(
                "A call into Mooncake raised an exception, its objects count as lost: please report it"
            )
            return [codes.CALL_RAISED] * count
        finally:
            with self._changed:
                client.inside -= 1
                self._changed.notify_all()
        return answers if len(answers) == count else [codes.NO_ANSWER] * count

    def _watch(self, keys: Sequence[str], answers: Sequence[int], *, writes: bool) -> None:
        with self._changed:
            doubtful = self._suspicion.watch(keys, answers, time.monotonic())
            # A client that holds capacity cannot be replaced without losing what it holds.
            if not doubtful or self._reopening or self._client is None or self.settings.segment_bytes:
                return
            self._reopening = True
        threading.Thread(target=self._reopen, args=(doubtful, writes), name="kvshare-reopen", daemon=True).start()

    def _reopen(self, doubtful: Sequence[str], writes: bool) -> None:
        """Replace the client if the master is well and, after reads, still reports what could not be read.

        After writes nothing can be reported: that they fail for longer than a master keeps a dead node says enough.
        """
        try:
            known = self.exists_many(doubtful)
            if min(known) < 0 or not (writes or 1 in known):
                return
            log.warning(
                "This Mooncake client cannot reach a node that the master calls healthy; opening a new client. If this "
                "repeats, look at the network between this pod and the store's nodes"
            )
            fresh = _Client(_set_up(self._library, self.settings))
            with self._registering:
                refused = [
                    code
                    for address, size in self._registered.items()
                    if (code := fresh.raw.register_buffer(address, size)) != codes.OK
                ]
                with self._changed:
                    if refused or self._client is None:
                        spare = fresh
                    else:
                        spare, self._client = self._client, fresh
                        self.reopened += 1
            if refused:
                log.error(
                    "Registering memory with a new Mooncake client: codes %s; keeping the old one. With rdma, raise "
                    "the limit of locked memory (ulimit -l, capability IPC_LOCK)", refused,
                )  # fmt: skip
            self._retire(spare)
        except StoreUnavailable as error:
            self._rarely.warning("Opening a new Mooncake client failed, keeping the old one: %s", error)
        except Exception:
            self._rarely.exception("Opening a new Mooncake client raised, keeping the old one: please report it")
        finally:
            with self._changed:
                self._reopening = False

    def _retire(self, client: _Client) -> None:
        with self._changed:
            idle = self._changed.wait_for(lambda: client.inside == 0, _CLOSE_WAIT_SECONDS)
        if not idle:
            log.error(
                "A call into Mooncake has not ended for %g s; its client is left open until the pod restarts",
                _CLOSE_WAIT_SECONDS,
            )
            return
        if (code := client.raw.close()) != codes.OK:
            log.warning(
                "Closing a Mooncake client: code %s (%s); its memory is free when the process ends",
                code,
                codes.explain(code).name,
            )


def _lists(
    keys: Sequence[str], segments: Sequence[Segments], batch: Sequence[int]
) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Keys, addresses and sizes of a batch, as Mooncake takes them, without empty segments."""
    return (
        [keys[i] for i in batch],
        [[address for address, size in segments[i] if size] for i in batch],
        [[size for _, size in segments[i] if size] for i in batch],
    )


def _set_up(library: Any, settings: StoreSettings) -> Any:
    """A client that is ready.

    Mooncake holds the interpreter lock during ``setup``, 4 s for every attempt at a master that does not answer. So the
    master's port is awaited here first, where other threads go on, and Mooncake gets one attempt.

    Raises:
        StoreUnavailable: nobody listens at the master's address, or Mooncake refused.
    """
    if not reachable(settings.master, settings.setup_seconds):
        answer = f"no connection in {settings.setup_seconds:g} s"
    else:
        raw = library.MooncakeDistributedStore()
        tenant = {} if settings.tenant == "default" else {"tenant_id": settings.tenant}
        try:
            code = raw.setup(
                settings.hostname or local_hostname(settings.master),
                settings.metadata_server,
                settings.segment_bytes,
                settings.buffer_bytes,
                settings.protocol,
                settings.device,
                settings.master,
                **tenant,
            )
            if code == codes.OK:
                return raw
            answer = f"code {code} ({codes.explain(code).name})"
        except Exception as error:  # wrong types for the native call
            answer = f"{type(error).__name__}: {error}"
    raise StoreUnavailable(
        f"Mooncake master {settings.master} over {settings.protocol} given, a master that answers and a device for "
        f"{settings.protocol} expected, got {answer}: check the address, the network and the device"
    )
