"""Announcements: KV events say that a block is stored when all of it is, and take it back when it is not."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.scheduler.announcements import Announcements, Removed, Stored, StoredBlock
from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


def block(number: int, parent: int | None = None) -> StoredBlock:
    """A block with a name for a hash."""
    return StoredBlock(_h(number), None if parent is None else _h(parent), (number, number))


def _h(number: int) -> bytes:
    return b"h%d" % number


CHAIN = [block(0), block(1, 0), block(2, 1), block(3, 2)]


def test_a_block_is_announced_when_the_last_rank_has_landed() -> None:
    """C16: three ranks, in two reports."""
    ledger = Announcements(3)
    ledger.planned(1, CHAIN)
    ledger.landed(1, 2)
    assert ledger.take() == []
    assert ledger.open
    ledger.landed(1, 1)
    ledger.landed(1, 1)
    ledger.landed(9, 3)
    assert ledger.take() == [Stored(tuple(CHAIN))]
    assert not ledger.open


def test_a_block_of_which_an_object_failed_is_not_announced() -> None:
    """The others are, in runs that hang together."""
    ledger = Announcements(2)
    ledger.planned(1, CHAIN)
    ledger.landed(1, 1)
    ledger.failed([_h(1), b"stranger"])
    ledger.landed(1, 1)
    assert ledger.take() == [Stored((CHAIN[0],)), Stored((CHAIN[2], CHAIN[3]))]


def test_blocks_that_do_not_follow_each_other_are_announced_apart() -> None:
    """An event has one parent for all its blocks."""
    ledger = Announcements(1)
    ledger.planned(1, [CHAIN[0], CHAIN[2]])
    ledger.landed(1, 1)
    assert ledger.take() == [Stored((CHAIN[0],)), Stored((CHAIN[2],))]


def test_only_what_was_announced_is_taken_back_and_only_once() -> None:
    """A block that comes again is announced again."""
    ledger = Announcements(1)
    ledger.planned(1, CHAIN[:2])
    ledger.landed(1, 1)
    ledger.take()
    ledger.removed([_h(1), _h(3)])
    ledger.removed([_h(1)])
    assert ledger.take() == [Removed((_h(1),))]
    ledger.planned(2, [CHAIN[1]])
    ledger.landed(2, 1)
    assert ledger.take() == [Stored((CHAIN[1],))]


def test_a_reset_takes_everything_back_and_forgets_what_is_on_its_way() -> None:
    """C10: a save that lands later is removed from the store, so it is never announced."""
    ledger = Announcements(1)
    ledger.planned(1, CHAIN[:2])
    ledger.landed(1, 1)
    ledger.planned(2, CHAIN[2:])
    ledger.reset()
    ledger.landed(2, 1)
    assert ledger.take() == [Stored(tuple(CHAIN[:2])), Removed((_h(0), _h(1)))]
    assert not ledger.open


def test_what_is_remembered_is_bounded() -> None:
    """The oldest are forgotten."""
    ledger = Announcements(1, limit=2)
    ledger.planned(1, CHAIN)
    ledger.landed(1, 1)
    ledger.take()
    ledger.reset()
    assert ledger.take() == [Removed((_h(2), _h(3)))]


@pytest.fixture
def with_events(engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch) -> "Callable[..., Any]":
    """Make engines that publish KV events, with whole hashes; what they publish is in ``published``."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")

    def make(*args: Any, enabled: bool = True, **kwargs: Any) -> Any:
        from vllm.config.kv_events import KVEventsConfig

        def change(config: Any) -> None:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=enabled, publisher="null")

        engine: Any = engines(*args, change=change, **kwargs)
        engine.published = []
        publisher = SimpleNamespace(publish=lambda batch: engine.published.extend(batch.events))
        monkeypatch.setattr(engine.scheduler, "kv_event_publisher", publisher)
        return engine

    return make


def ours(engine: Any) -> list[Any]:
    """Events about the store; the others are about the engine's own cache."""
    return [event for event in engine.published if getattr(event, "medium", None) == "STORAGE"]


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_a_saved_prompt_is_published_as_vllm_publishes_its_own_blocks(
    world: "World", with_events: "Callable[..., Any]", layout: str
) -> None:
    """E7: four ranks, packed and direct: hashes, parents, tokens and extra keys are those of the engine's own cache.

    The medium is one, whichever replica and tier the store has chosen.
    """
    extra = {"pipeline_parallel_sizes": [1, 2]}
    engine = with_events(world, "a", tp=2, pp=2, layout=layout, extra=extra)
    engine.add("r", PROMPT, cache_salt="pepper")
    engine.run()
    (stored,) = ours(engine)
    (local,) = [event for event in engine.published if event not in ours(engine)]
    assert type(stored) is type(local)
    for name in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "group_idx"):
        assert getattr(stored, name) == getattr(local, name), name
    assert (stored.locality, stored.ownership) == ("REMOTE", "kvshare")
    assert len(stored.block_hashes) == 12
    assert stored.token_ids == PROMPT[:48]
    assert stored.extra_keys[0] == ("pepper",)


def test_a_block_with_an_object_that_did_not_arrive_is_not_published(
    world: "World", engines: "Callable[..., Engine]", with_events: "Callable[..., Any]"
) -> None:
    """One shard of block 5 on one rank of two; decoded blocks come in events of their own."""
    engines(world, "w").ask(PROMPT)
    world.store.evict(lambda key: "kfull" in key)
    engine = with_events(world, "a", tp=2)
    engine.ask([7] * 4)
    engine.faults.fail("put", codes.NO_SPACE, lambda key: world.number(key) == 5 and key.endswith("s3p0"))
    engine.ask(PROMPT, max_tokens=9)
    hashes = [bytes(h) for event in ours(engine)[1:] for h in event.block_hashes]
    assert [world.texts[h][1] for h in hashes] == [n for n in range(14) if n != 5]
    parents = [event.parent_block_hash for event in ours(engine)]
    assert parents[:2] == [None, None]
    assert None not in parents[2:]


def test_a_reset_and_a_miss_are_published(world: "World", with_events: "Callable[..., Any]") -> None:
    """C10: everything at a reset; before that, the block that a lookup has missed."""
    engine = with_events(world, "a")
    engine.ask(PROMPT)
    world.store.evict(lambda key: world.number(key) == 4)
    assert engine.pool.reset_prefix_cache()
    engine.ask([*PROMPT, 3])
    (removed,) = [event for event in ours(engine) if type(event).__name__ == "BlockRemoved"]
    assert [world.texts[bytes(h)][1] for h in removed.block_hashes] == [4]
    stored = [bytes(h) for event in ours(engine) if event is not removed for h in event.block_hashes]
    assert [world.texts[h][1] for h in stored] == [*range(12), *range(4, 12)]  # from the first miss on again
    engine.published.clear()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    (removed,) = ours(engine)
    assert {bytes(h) for h in removed.block_hashes} == set(stored)


def test_nothing_is_published_and_nothing_kept_without_events(
    world: "World", with_events: "Callable[..., Any]"
) -> None:
    """Events cost tokens and memory, so they are made only where vLLM's configuration enables them."""
    engine = with_events(world, "a", enabled=False)
    engine.ask(PROMPT)
    assert engine.published == []
    assert engine.side._announcements is None
    assert list(engine.connector.take_events()) == []


def test_events_pass_through_multi_connector(world: "World", with_events: "Callable[..., Any]") -> None:
    """It forwards what the scheduler's side of a child has, and nothing of what ranks would publish themselves."""
    other = {"kv_connector": "OtherConnector", "kv_connector_module_path": "other_connector", "kv_role": "kv_both"}
    engine = with_events(world, "a", tp=2, beside=[other]).run().ready()
    engine.ask(PROMPT)
    assert [len(event.block_hashes) for event in ours(engine)] == [12]


def test_an_engine_whose_store_hangs_sleeps_in_spite_of_open_announcements(
    world: "World", with_events: "Callable[..., Any]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6: packed blocks are released long before they land; the event comes with the next request."""
    from kvshare_connector.scheduler import glue

    monkeypatch.setattr(glue, "NEWS_SECONDS", 0.1)
    engine = with_events(world, "a")
    gate = engine.faults.hang("put", lambda key: "kfull" in key)
    engine.add("r", PROMPT)

    def packed() -> bool:
        return bool(engine.outputs["r"] != [] and engine.side._pins.jobs == 0)

    engine.step_until(lambda: packed() and not engine.connector.has_pending_push_work())
    assert ours(engine) == []
    gate.set()
    engine.ask([1, 2, 3])
    engine.step_until(lambda: ours(engine) != [])
    assert [len(event.block_hashes) for event in ours(engine)] == [12]
