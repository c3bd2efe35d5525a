"""Recovery: whatever fails, requests get the answer of a cold engine, blocks come back, nothing is asked for ever."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


def objects_only(key: str) -> bool:
    """Keys of blocks, without the manifest."""
    return "kfull" in key


@pytest.mark.parametrize(
    ("layout", "code"),
    [("LBNHC", codes.NO_SPACE), ("BLHNC", codes.TRANSFER_FAIL), ("BLHNC", codes.NO_SPACE), ("LBNHC", None)],
)
def test_a_store_that_refuses_every_save_leaks_no_block(
    world: "World", engines: "Callable[..., Engine]", layout: str, code: int | None
) -> None:
    """C3: 100 requests, packed and direct, with every code and with exceptions: all blocks are free in the end."""
    engine = engines(world, "a", tp=2, blocks=100, layout=layout)
    if code is None:

        def broken(*_: object) -> None:
            raise RuntimeError("a fault of this test")

        engine.faults.before("put", broken)
    else:
        engine.faults.fail("put", code)
    for number in range(100):
        engine.add(f"r{number}", [number % 90 + 3, number // 90 + 3, *PROMPT[: 10 + number % 30]], max_tokens=3)
        engine.step()
    engine.run()
    assert all(engine.outputs[r] == engine.answer(r)[:3] for r in engine.outputs)
    assert [key for key in world.store.keys if objects_only(key)] == []
    assert engine.used_blocks == engine.side._pins.blocks == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("bad", [0, 5, 11])
def test_a_bad_block_anywhere_in_a_load_costs_what_lies_behind_it(
    world: "World", engines: "Callable[..., Engine]", bad: int, requests: int, asynchronous: bool
) -> None:
    """D4: first, middle, last; alone and concurrent; with and without running ahead; on one rank of two."""
    prompts = [[number + 3, *PROMPT[1:]] for number in range(requests)]
    writer = engines(world, "a")
    for prompt in prompts:
        writer.ask(prompt)
    reader = engines(world, "b", tp=2, asynchronous=asynchronous)
    reader.faults.fail("get", codes.NOT_FOUND, lambda key: world.number(key) == bad and key.endswith("s3p0"))
    for number, prompt in enumerate(prompts):
        reader.add(f"r{number}", prompt, max_tokens=5)
    reader.run()
    assert all(reader.outputs[r] == reader.answer(r)[:5] for r in reader.outputs)
    assert reader.count("failed_loads") == reader.loads_planned == requests
    assert reader.count("hit_tokens") == bad * 4 * requests
    assert reader.used_blocks == 0


@pytest.mark.parametrize("from_call", [0, 1, 3])
def test_a_lease_that_runs_out_during_a_long_load_ends_it_there(
    world: "World", engines: "Callable[..., Engine]", from_call: int
) -> None:
    """D8: a load is cut into calls, each of which takes its own lease; what was read before is used, the rest computed.

    Never the whole batch, and never bytes that came after the lease.
    """
    long = [(i * 7) % 90 + 5 for i in range(250)]
    engines(world, "a").ask(long)
    reader = engines(world, "b", extra={"staging_bytes": 1 << 12})
    calls: list[int] = []

    def expired(_: str, keys: object) -> None:
        calls.append(len(list(keys)))  # type: ignore[call-overload]
        if len(calls) > from_call:
            reader.faults.fail("get", codes.LEASE_EXPIRED, objects_only)

    reader.faults.before("get", expired)
    reader.add("r", long, max_tokens=3)
    reader.run()
    assert reader.outputs["r"] == reader.answer("r")[:3]
    assert max(calls) <= 64
    assert reader.count("hit_tokens") == sum(calls[:from_call]) // 4 * 4
    assert reader.count("failed_keys:get:LEASE_EXPIRED") > 0
    assert reader.loads_planned == 1
    reader.faults.clear()
    assert reader.used_blocks == 0


def test_objects_that_leave_between_lookup_and_load_fail_no_request(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """D6: one object in twenty is evicted just before it is read; 20 requests, none fails."""
    prompts = [[number + 3, *PROMPT[1:]] for number in range(20)]
    writer = engines(world, "a", tp=2)
    for prompt in prompts:
        writer.ask(prompt)
    reader = engines(world, "b", tp=4)
    read = [0]

    def evicting(_: str, keys: object) -> None:
        for key in list(keys):  # type: ignore[call-overload]
            read[0] += 1
            if read[0] % 20 == 0:
                world.store.evict([key])

    reader.faults.before("get", evicting)
    for number, prompt in enumerate(prompts):
        reader.add(f"r{number}", prompt, max_tokens=2)
    reader.run()
    assert all(reader.outputs[r] == reader.answer(r)[:2] for r in reader.outputs)
    assert 0 < reader.count("failed_loads") <= 20
    assert reader.loads_planned == 20
    assert reader.used_blocks == 0
