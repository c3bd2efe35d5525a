"""Windows inside vLLM's MultiConnector: two connectors that load, and failures that are told by request."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]
OTHER = {"kv_connector": "OtherConnector", "kv_connector_module_path": "other_connector", "kv_role": "kv_both"}


@pytest.fixture
def hybrid(new_world: "Callable[..., World]") -> "World":
    """A world whose model has windows of 8 tokens in two cache groups, and full attention in one."""
    from played_model import Shape

    return new_world(Shape(layers=6, windows=(8, 8, 0)))


@pytest.fixture
def beside(other: Any, engines: "Callable[..., Engine]") -> "Callable[..., Engine]":
    """Make engines with both connectors, ready for requests, with room for the pins of three groups."""
    assert other

    def make(*args: Any, **kwargs: Any) -> "Engine":
        return engines(*args, beside=[OTHER], blocks=2000, **kwargs).run().ready()

    return make


@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_topology_reads_what_one_has_written(
    hybrid: "World", engines: "Callable[..., Engine]", beside: "Callable[..., Engine]", asynchronous: bool
) -> None:
    """Beside another connector and alone, two sizes and two layouts: one namespace, and all bytes are compared."""
    one = beside(hybrid, "a", tp=2, asynchronous=asynchronous)
    two = beside(hybrid, "b", tp=4, layout="LBHNC", asynchronous=asynchronous)
    assert one.ask(PROMPT) == 0
    assert two.ask(PROMPT, max_tokens=30) == 48
    longer = [*PROMPT, *two.outputs["b-0"], 5]
    assert one.ask(longer) == 76 - 48
    assert engines(hybrid, "c", blocks=2000).ask(longer) == len(longer) // 4 * 4
    assert hybrid.check_store() == 2 * 4 * (len(longer) // 4)
    assert one.used_blocks == two.used_blocks == 0


@pytest.mark.parametrize("bad", ["/kfull", "/kwindow"])
def test_a_failed_load_of_ours_is_computed(hybrid: "World", beside: "Callable[..., Engine]", bad: str) -> None:
    """The failed request reaches the scheduler through MultiConnector, and does not ask again."""
    beside(hybrid, "a").ask(PROMPT)
    reader = beside(hybrid, "b", tp=2)
    reader.faults.fail("get", codes.TRANSFER_FAIL, lambda key: bad in key and key.endswith("s2p0"))
    assert reader.ask(PROMPT, max_tokens=3) == 0
    assert reader.count("failed_loads") == reader.loads_planned == 1
    assert reader.used_blocks == 0


def test_hits_of_the_other_connector_are_its_own(hybrid: "World", beside: "Callable[..., Engine]", other: Any) -> None:
    """It comes first: its failed load, told by request too, is computed; nothing of it is stored."""
    beside(hybrid, "a").ask(PROMPT)
    reader = beside(hybrid, "b", tp=2)
    other.hits = {"r": 48, "s": 24}
    reader.add("r", PROMPT, max_tokens=3)
    reader.add("s", [4, *PROMPT[1:]], max_tokens=20)
    reader.run()
    assert all(reader.outputs[name] == reader.answer(name)[: len(reader.outputs[name])] for name in "rs")
    assert reader.loads_planned <= 2
    assert hybrid.check_store() >= 2 * 48
    assert reader.used_blocks == 0


def test_an_abort_while_the_other_connector_loads_saves_nothing(
    hybrid: "World", beside: "Callable[..., Engine]", other: Any
) -> None:
    """The engine counts the other's tokens as computed at once; their blocks hold anything."""
    engine = beside(hybrid, "a")
    other.hits, other.finishing = {"r": 48}, False
    engine.add("r", PROMPT)
    for _ in range(5):
        engine.step()
    engine.abort("r")
    other.finishing = True
    engine.run()
    assert hybrid.check_store() == 0
    assert engine.used_blocks == 0


def test_after_another_connectors_load_has_failed_ours_does_not_offer_one(
    hybrid: "World", other: Any, engines: "Callable[..., Engine]"
) -> None:
    """vLLM goes on reserving blocks for the failed load: a second one would need them twice, and wait for ever."""
    prompt = PROMPT  # needs 39 blocks of 44
    engines(hybrid, "a", blocks=4000).ask(prompt)
    two = engines(hybrid, "b", beside=[OTHER], blocks=45).run().ready()
    other.hits = {"r": 32}
    two.add("r", prompt, max_tokens=3)
    two.run()
    assert two.outputs["r"] == two.answer("r")[:3]
    assert two.loads_planned == 0
    assert two.used_blocks == 0
