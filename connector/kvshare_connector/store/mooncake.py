"""Mooncake: an ``ObjectStore`` on top of Mooncake's client.

May live here: opening, guarding, batching, replacing a client. Mooncake's client ends the process when it is used
before ``setup`` or after ``close``, loses a destination when a key comes twice in one GET, and may wedge for good when
too many segments are in flight. None of that passes this file.
"""

import ctypes
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare_connector.lines import Rarely
from kvshare_connector.store import codes
from kvshare_connector.store.avoided import AVOID_SECONDS, HUNG_AFTER_SECONDS, Avoided
from kvshare_connector.store.batches import MOST_NAMES, OVER_TCP, WIDE, InFlight, cut, rounds_without_repeats
from kvshare_connector.store.codes import Reaction
from kvshare_connector.store.held import put_held
from kvshare_connector.store.installation import library, set_up
from kvshare_connector.store.protocol import Segments, StoreSetupError, StoreUnavailable, segments_bytes
from kvshare_connector.store.settings import StoreSettings, set_environment
from kvshare_connector.store.suspicion import Suspicion

log = logging.getLogger(__name__)

#: A call that failed at once is tried once more; one that has already waited this long is not.
_RETRY_BEFORE_SECONDS = 1.0
_NO_SPACE_PAUSE_SECONDS = 0.05
#: How long closing waits for calls that other threads still have inside Mooncake.
_CLOSE_WAIT_SECONDS = 70.0


@dataclass
class _Client:
    """A set-up client, and how many calls are inside it."""

    raw: Any
    inside: int = 0


class MooncakeStore:
    """A client of a Mooncake store. Make it with ``open``; all methods may be called from any thread."""

    def __init__(self, settings: StoreSettings, module: Any, raw: Any) -> None:
        self.settings = settings
        self.reopened = 0
        self._library = module
        self._client: _Client | None = _Client(raw)
        self._changed = threading.Condition()
        self._limits = OVER_TCP if settings.protocol == "tcp" else WIDE
        self._in_flight = InFlight(self._limits.in_flight)
        # Held while ranges are registered, and while a new client that knows them all takes over.
        self._registering = threading.Lock()
        self._registered: dict[int, int] = {}
        self._suspicion = Suspicion()
        self._avoided = Avoided()
        self._rarely = Rarely(log)
        self._reopening = False

    @classmethod
    def open(cls, settings: StoreSettings) -> "MooncakeStore":
        """Load Mooncake and set a client up; takes ``settings.setup_seconds`` and one attempt (4 s) at most.

        Raises:
            StoreUnavailable: Mooncake is missing or does not fit, or the master does not answer; one sentence.
        """
        set_environment(settings)
        module = library()
        return cls(settings, module, set_up(module, settings))

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
            return self._put(raw, *_lists(keys, segments, batch), config)

        return self._transfer(keys, segments, [list(range(len(keys)))], call, writes=True)

    def get_many(self, keys: Sequence[str], segments: Sequence[Segments]) -> list[int]:
        """See ``ObjectStore``; equal keys go into different calls, because Mooncake fills one of them only.

        A removal that is forced, as by the reset of another engine's cache, gives memory to the next object in the
        middle of a read, which Mooncake calls a success: what is gone afterwards was not read.
        """
        results = self._transfer(
            keys,
            segments,
            list(rounds_without_repeats(keys)),
            lambda raw, batch: raw.batch_get_into_multi_buffers(*_lists(keys, segments, batch)),
            writes=False,
        )
        read = [i for i, found in enumerate(results) if found > 0]
        for i, there in zip(read, self.exists_many([keys[i] for i in read]), strict=True):
            if there != 1:
                results[i] = min(there, 0) or codes.NOT_FOUND
        return results

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
        if self.settings.protocol == "tcp":
            buffer = ctypes.create_string_buffer(data, len(data))
            return self.put_many([key], [[(ctypes.addressof(buffer), len(data))]])[0]
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

    def _put(
        self, raw: Any, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], config: Any
    ) -> list[int]:
        if self.settings.protocol == "tcp":
            return put_held(raw, keys, addresses, sizes, config)
        return list(raw.batch_put_from_multi_buffers(keys, addresses, sizes, config))

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
            for batch in cut(good, counts, self._limits):
                with self._in_flight.room(sum(counts[i] for i in batch)):
                    asked = batch if writes else self._without_avoided(keys, batch)
                    started = time.monotonic()
                    told = dict(zip(asked, self._with_retry(asked, call) if asked else [], strict=True))
                    if not writes and time.monotonic() - started > HUNG_AFTER_SECONDS:
                        # Before the room is given up: whoever waits for it must know.
                        self._avoid([keys[i] for i in asked if told[i] == codes.TRANSFER_FAIL])
                for i in batch:
                    results[i] = told.get(i, codes.TRANSFER_FAIL)
                self._watch([keys[i] for i in asked], list(told.values()), writes=writes)
        return results

    def _without_avoided(self, keys: Sequence[str], batch: Sequence[int]) -> list[int]:
        """Those of ``batch`` whose objects are not on a node that is avoided."""
        with self._changed:
            avoided = self._avoided.nodes(time.monotonic())
        if not avoided:
            return list(batch)
        nodes = self._nodes([keys[i] for i in batch])
        return [i for i in batch if not avoided.intersection(nodes.get(keys[i], ()))]

    def _avoid(self, keys: Sequence[str]) -> None:
        """Read nothing for a while from the nodes that hold ``keys``: a call has just waited for them in vain."""
        hung = {node for nodes in self._nodes(keys).values() for node in nodes} if keys else set[str]()
        if hung:
            with self._changed:
                self._avoided.add(hung, time.monotonic())
            self._rarely.warning(
                "Store node %s did not answer in time; its objects are a miss for the next %g s",
                ", ".join(sorted(hung)), AVOID_SECONDS,
            )  # fmt: skip

    def _nodes(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """The nodes that hold each of ``keys``, as far as the master says it."""
        found: dict[str, list[str]] = {}

        def call(raw: Any) -> list[int]:
            for key, replicas in raw.batch_get_replica_desc(list(keys)).items():
                found[key] = [
                    str(replica.get_memory_descriptor().buffer_descriptor.transport_endpoint)
                    for replica in replicas
                    if replica.is_memory_replica()
                ]
            return [codes.OK]

        self._call(1, call)
        return found

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
            fresh = _Client(set_up(self._library, self.settings))
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
