"""Whether a store's master answers the operator: a TCP connection, and now and then one question in its own protocol.

Why this exists: a port that accepts connections may belong to something else (the HTTP port beside it is a common
mistake), or to a master whose threads are stuck. The question is a call of a function that no master has: the answer
"not registered" proves that its RPC server reads, works and answers, and needs no knowledge of its version. A master
notes such a call in its log, so it is made rarely. Each step has a timeout; nothing is ever asked twice at once.

The header is that of coro_rpc (yalantinglibs), which Mooncake uses: magic, version, serialisation, message type,
sequence number, function, body length, attachment length; the answer begins with the same magic byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Collection
from typing import Final

from kvshare_operator.core.pool.status import Reach

_SECONDS: Final = 2.0
_REACHED_SECONDS: Final = 30.0
"""How long a good answer is used again; events come faster than stores change."""
_FAILED_SECONDS: Final = 5.0
_QUESTION_SECONDS: Final = 600.0
_MAGIC: Final = 21
_QUESTION: Final = struct.pack("<BBBBIIII", _MAGIC, 0, 0, 0, 1, 0, 0, 0)
_ANSWER_BYTES: Final = 16
_AT_ONCE: Final = 64


class StoreProbe:
    """Remembers what masters answered, by address."""

    def __init__(self) -> None:
        self._reach: dict[str, tuple[float, Reach]] = {}
        self._asked: dict[str, float] = {}

    async def look(self, addresses: Collection[str]) -> dict[str, Reach]:
        """Return what each master answers; never raises. Many are asked at once: a few that hang delay nobody."""
        wanted = sorted(set(addresses))
        for gone in self._reach.keys() - wanted:
            if time.monotonic() - self._reach[gone][0] > _QUESTION_SECONDS:
                del self._reach[gone]
                self._asked.pop(gone, None)
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(address: str) -> Reach:
            async with turns:
                try:
                    return await self.reach(address)
                except Exception as error:  # such as an address that no rule has let through
                    return Reach(False, f"it cannot be asked: {error}")

        return dict(zip(wanted, await asyncio.gather(*map(one, wanted)), strict=True))

    async def reach(self, address: str) -> Reach:
        """Return whether the master at ``address`` answers, from memory while that is fresh."""
        now = time.monotonic()
        when, reach = self._reach.get(address, (0.0, Reach(None)))
        if reach.reached is not None and now - when <= (_REACHED_SECONDS if reach.reached else _FAILED_SECONDS):
            return reach
        ask = not reach.reached or now - self._asked.get(address, 0.0) > _QUESTION_SECONDS
        reach = await connect(address, ask=ask)
        self._reach[address] = (time.monotonic(), reach)
        if ask and reach.reached:
            self._asked[address] = time.monotonic()
        return reach


async def connect(address: str, *, ask: bool = True) -> Reach:
    """Try a connection to a master, and with ``ask`` one question.

    Of an `etcd://` list one connection is enough; no question is asked there, because etcd stands behind it.
    """
    replicated = address.startswith("etcd://")
    problem = ""
    for target in address.removeprefix("etcd://").split(","):
        host, _, port = target.rpartition(":")
        try:
            async with asyncio.timeout(_SECONDS):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except TimeoutError:
            problem = f"no connection within {_SECONDS:g} s"
            continue
        except OSError as error:
            problem = error.strerror or type(error).__name__
            continue
        try:
            problem = await _question(reader, writer) if ask and not replicated else ""
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_SECONDS):
                    await writer.wait_closed()
        if not problem:
            return Reach(True)
    return Reach(False, problem)


async def _question(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Ask, and return what is wrong with the answer; empty when it is one of a Mooncake master."""
    try:
        writer.write(_QUESTION)
        async with asyncio.timeout(_SECONDS):
            answer = await reader.readexactly(_ANSWER_BYTES)
    except TimeoutError:
        return f"it accepts connections, and does not answer a call within {_SECONDS:g} s"
    except asyncio.IncompleteReadError as error:
        answer = error.partial
    except OSError as error:
        return f"it accepts connections and ends them: {error.strerror or type(error).__name__}"
    if not answer:
        return "it accepts connections and ends them without an answer: is this the RPC port of a Mooncake master?"
    if answer[0] != _MAGIC:
        return "something else than a Mooncake master answers there: is this the RPC port?"
    return ""
