"""Whether a master answers: over TCP, then in its own protocol, each step with a timeout, and not too often."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvshare_operator.core.pool.status import Reach
from kvshare_operator.edges import store_probe
from kvshare_operator.edges.store_probe import StoreProbe, connect
from testbed import mooncake
from testbed.ports import free_ports

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """A server on loopback; yields its address."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def master(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers as a master does."""
    await reader.readexactly(20)
    writer.write(bytes([21, 0, 11, 0]) + bytes(12))
    await writer.drain()


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers as the HTTP port beside it."""
    await reader.read(20)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()


async def stuck(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Accepts and never answers."""
    await reader.read()


async def hasty(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    """Ends every connection at once, as a proxy without a backend."""


@pytest.mark.parametrize(
    ("handler", "words"),
    [(master, ""), (web, "something else"), (stuck, "does not answer a call"), (hasty, "ends them")],
)
def test_only_an_answer_in_mooncakes_protocol_counts(
    handler: Handler, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that merely accepts connections is not a master."""
    if handler is stuck:
        monkeypatch.setattr(store_probe, "_SECONDS", 0.3)

    async def run() -> Reach:
        async with listening(handler) as address:
            return await connect(address)

    found = asyncio.run(run())
    assert found.reached is (not words)
    assert words in found.problem


def test_closed_port_and_unknown_host_say_why() -> None:
    """In the operating system's words."""
    (port,) = free_ports(1)
    refused = asyncio.run(connect(f"127.0.0.1:{port}"))
    assert (refused.reached, bool(refused.problem)) == (False, True)
    unknown = asyncio.run(connect("no-such-host.invalid:50051"))
    assert (unknown.reached, bool(unknown.problem)) == (False, True)


def test_one_member_of_a_replicated_masters_etcd_is_enough() -> None:
    """B64: `etcd://a,b`; etcd is not asked in Mooncake's protocol."""

    async def run() -> Reach:
        (closed,) = free_ports(1)
        async with listening(stuck) as address:
            return await connect(f"etcd://127.0.0.1:{closed},{address}")

    assert asyncio.run(run()) == Reach(True)


def test_good_answers_are_used_again_and_calls_are_rare() -> None:
    """Events come faster than stores change; a master notes such calls in its log."""
    connections = 0

    async def counting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await master(reader, writer)

    async def run() -> None:
        async with listening(counting) as address:
            probe = StoreProbe()
            for _ in range(20):
                assert (await probe.reach(address)).reached
        assert connections == 1

    asyncio.run(run())


def test_many_masters_that_hang_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty that give no answer before the last was asked; impossible addresses are an answer too."""
    monkeypatch.setattr(store_probe, "_SECONDS", 30.0)

    async def run() -> dict[str, Reach]:
        all_asked, asked = asyncio.Event(), 0

        async def hanging(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            nonlocal asked
            asked += 1
            if asked == 40:
                all_asked.set()
            await all_asked.wait()

        async with contextlib.AsyncExitStack() as stack:
            stuck_ones = [await stack.enter_async_context(listening(hanging)) for _ in range(40)]
            good = await stack.enter_async_context(listening(master))
            found = await StoreProbe().look([*stuck_ones, good, good, "no-port", "host:99999999", "h\ud800:1"])
            assert found.pop(good) == Reach(True)
            assert all("ends them" in found[one].problem for one in stuck_ones)
            return found

    found = asyncio.run(run())
    assert len(found) == 43
    assert {one.reached for one in found.values()} == {False}
    assert all(one.problem for one in found.values())


@pytest.mark.mooncake
def test_real_master_answers(tmp_path: pathlib.Path) -> None:
    """The installed Mooncake, with a probe that knows nothing of its version."""
    with mooncake.store(tmp_path) as store:
        assert asyncio.run(connect(store.address)) == Reach(True)
