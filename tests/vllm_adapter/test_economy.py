"""Economy: what is never asked, never moved twice and never held, and how much is moved when it must be."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.store.settings import settings_from
from kvshare_layout import keys
from kvshare_layout.config import parse

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


def watched(engine: "Engine") -> Counter[str]:
    """How many blocks' objects the engine gives to each operation of the store from now on."""
    counts: Counter[str] = Counter()

    def note(operation: str, asked: Sequence[str]) -> None:
        counts[operation] += sum("kfull" in key for key in asked)

    for operation in ("exists", "get", "put"):
        engine.faults.before(operation, note)
    return counts


def test_eight_equal_prompts_at_once_are_answered_right_and_their_reads_are_counted(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """C12: concurrent requests for one prefix load it each for itself, or find it in the engine's own cache."""
    engines(world, "a").ask(PROMPT)
    reader = engines(world, "b", tp=2)
    counts = watched(reader)
    for number in range(8):
        reader.add(f"r{number}", PROMPT, max_tokens=4)
    reader.run()
    assert all(reader.outputs[r] == reader.answer(r)[:4] for r in reader.outputs)
    once = 12 * 4
    assert once <= counts["get"] <= 8 * once
    assert counts["get"] % once == 0
    assert reader.used_blocks == 0


def test_what_the_engine_has_itself_is_never_asked_of_the_store(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """D9: every probe renews leases, and leased objects cannot be evicted: 1,000 requests ask for nothing they have."""
    engine = engines(world, "a", tp=2)
    engine.ask(PROMPT)
    counts = watched(engine)
    for number in range(1000):
        engine.add(f"r{number}", PROMPT)
        if number % 8 == 7:
            engine.run()
    engine.run()
    assert counts["exists"] == 0
    assert all(engine.outputs[r] == engine.answer(r)[:1] for r in engine.outputs)


def test_a_question_is_asked_once_however_often_the_engine_repeats_it(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """D9, E2: the scheduler asks in every step while a request waits."""
    engines(world, "w").ask(PROMPT)
    engine = engines(world, "a")
    counts = watched(engine)
    gate = engine.faults.hang("exists")
    engine.add("r", PROMPT)
    for _ in range(200):
        engine.step()
    gate.set()
    engine.run()
    assert engine.count("lookups") == 1
    assert counts["exists"] == 12 + 12 * 3
    assert engine.count("hit_tokens") == 48


def test_saves_go_on_as_soon_as_a_full_store_has_room(world: "World", engines: "Callable[..., Engine]") -> None:
    """D9: refused saves are forgotten, not believed to be stored, so the next request stores what is missing."""
    engine = engines(world, "a", tp=2)
    world.store.contents.capacity = world.store.contents.used + 4 * 20 * 32
    engine.ask(PROMPT)
    stored = world.check_store()
    assert 0 < stored < 48
    assert engine.count("failed_keys:put:NO_AVAILABLE_HANDLE") > 0
    world.store.contents.capacity = None
    assert engine.pool.reset_prefix_cache()
    engine.ask(PROMPT)
    assert world.check_store() == 48


@pytest.mark.parametrize(("heads", "tp", "pp"), [(1, 4, 1), (2, 8, 2), (4, 4, 1), (4, 1, 2)])
def test_every_byte_of_a_block_is_written_once(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]", heads: int, tp: int, pp: int
) -> None:
    """E3, B3: MQA and MLA on four ranks, replicas in turn: bytes put are the model's unique KV bytes, exactly."""
    from played_model import Shape

    world = new_world(Shape(kv_heads=heads))
    extra = {"pipeline_parallel_sizes": [1, 2]}
    engine = engines(world, "a", tp=tp, pp=pp, extra=extra)
    engine.ask(PROMPT)
    unique = 12 * 4 * heads * 4 * 8  # blocks, layers, heads, tokens, cell
    assert sum(client.counts.bytes["put"] for client in engine.clients) == unique
    assert engine.count("saved_bytes") == unique
    reader = engines(world, "b", tp=1, extra=extra)
    assert reader.ask(PROMPT) == 48


@pytest.mark.parametrize("extra", [{}, {"store_tp_size": "four"}])
def test_ranks_never_write_each_others_objects(
    world: "World", engines: "Callable[..., Engine]", extra: dict[str, Any]
) -> None:
    """A13: shards of one block, shared or isolated, have keys of their own, so no tier can mix them up."""
    engine = engines(world, "a", tp=4, extra=extra)
    written: list[list[str]] = [[] for _ in engine.ranks]
    for rank, names in zip(engine.ranks, written, strict=True):
        client: Any = rank.connector._worker_side._client
        put = client.current().put_many

        def noting(asked: Any, *args: Any, put: Any = put, names: list[str] = names) -> Any:
            names.extend(asked)
            return put(asked, *args)

        client.current().put_many = noting
    engine.ask(PROMPT)
    together = [name for names in written for name in names]
    assert len(together) == len(set(together)) == 4 * 12
    assert all({keys.parse_object_key(name)[3] for name in names} == {n} for n, names in enumerate(written))


def test_an_engine_that_only_produces_never_looks_anything_up(world: "World", engines: "Callable[..., Engine]") -> None:
    """E8: vLLM's role kv_producer: no probe, no load, but saves."""
    engines(world, "w").ask(PROMPT)
    engine = engines(world, "a", tp=2, kv_role="kv_producer")
    counts = watched(engine)
    assert engine.ask(PROMPT) == 0
    assert engine.ask([1, *PROMPT], max_tokens=20) == 0
    assert (counts["exists"], counts["get"], counts["put"]) == (0, 0, 24 * 4)
    assert world.check_store() == (12 + 12) * 4


def test_engines_lend_the_store_no_memory_unless_they_are_told_to() -> None:
    """E4: a size is what each rank lends; the scheduler's client never lends, so nothing is multiplied unseen."""
    raw = {"master_server_address": "s:10.0.0.1:50051"}
    assert settings_from(parse(raw).config).segment_bytes == 0
    lending = settings_from(parse({**raw, "global_segment_size": "4gb"}).config)
    assert lending.segment_bytes == 4 << 30
    assert lending.metadata_only().segment_bytes == 0
