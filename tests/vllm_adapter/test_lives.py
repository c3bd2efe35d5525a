"""Whole lives of requests on vLLM's own scheduler: what happens between their steps, and what must come of it."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


def wait_until(condition: Callable[[], bool]) -> None:
    """Let the transfer threads work; packed blocks are released before they have arrived in the store."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def moving(engine: "Engine") -> bool:
    """Whether any rank still packs, puts or gets."""
    transfers = [rank.connector._worker_side._transfers for rank in engine.ranks]
    return any(mover.open for mover in transfers if mover is not None)


def objects_only(key: str) -> bool:
    """Keys of blocks, without the manifest."""
    return "kfull" in key


def test_a_request_aborted_while_it_loads_saves_nothing_that_was_not_proven(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """F9: the engine counts a load's tokens as computed at once; its blocks hold anything until the load is proven."""
    engines(world, "a", tp=2).ask(PROMPT)
    reader = engines(world, "b")
    gate = reader.faults.hang("get", objects_only)
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


def held_back(engine: "Engine", monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Calls that announce a load, kept until somebody makes them, as vLLM 0.33 keeps them while steps are under way."""
    kept: list[Callable[[], None]] = []
    announce = engine.whole.update_state_after_alloc

    def keep(request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            kept.append(lambda: announce(request, blocks, tokens))
        else:
            announce(request, blocks, tokens)

    monkeypatch.setattr(engine.whole, "update_state_after_alloc", keep)
    return kept


def test_a_request_that_ends_before_its_load_is_announced_saves_nothing_of_it(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """F9: it has computed before, was preempted, and has blocks again that nobody has written to."""
    prompt = [*PROMPT, *PROMPT, *PROMPT]
    reader = engines(world, "b")
    reader.add("r", prompt)
    reader.step_until(lambda: "r" in reader.side._computing)
    engines(world, "a").ask(prompt)
    reader.scheduler._preempt_request(reader.scheduler.running.pop(), time.monotonic())
    kept = held_back(reader, monkeypatch)
    reader.step_until(lambda: bool(kept))
    wait_until(lambda: not moving(reader))
    world.store.evict(lambda key: True)
    reader.abort("r")
    for _ in range(5):
        reader.step()
    wait_until(lambda: not moving(reader))
    assert world.check_store() == 0


def test_a_load_that_is_announced_after_a_reset_proves_nothing(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10: it was looked up before, so what it would read may be of other weights."""
    engines(world, "a").ask(PROMPT)
    reader = engines(world, "b")
    kept = held_back(reader, monkeypatch)
    monkeypatch.setattr(reader.side, "_remove_all", lambda: None)  # the keys are there for some time yet
    reader.add("r", PROMPT)
    reader.step_until(lambda: bool(kept))
    reader.scheduler.reset_prefix_cache(reset_connector=True)
    kept.pop()()
    reader.run()
    assert reader.outputs["r"] == reader.answer("r")[:1]
    assert reader.count("failed_loads") == 1
    assert reader.count("hit_tokens") == 0
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
    assert reader.loads_planned == 1
    assert reader.outputs["r"] == reader.answer("r")[:1]
    assert not reader.side._unread


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_second_engine_reads_what_the_first_has_written_and_the_other_way_round(
    world: "World", engines: "Callable[..., Engine]", asynchronous: bool
) -> None:
    """C19, F9: prompt blocks one way, decoded blocks the other, two sizes and two layouts."""
    one = engines(world, "a", tp=2, layout="LBNHC", asynchronous=asynchronous)
    two = engines(world, "b", tp=4, layout="LBHNC", asynchronous=asynchronous)
    assert one.ask(PROMPT) == 0
    assert two.ask(PROMPT, max_tokens=30) == 48
    longer = [*PROMPT, *two.outputs["b-0"], 5]
    assert one.ask(longer) == 76 - 48  # the rest is in its own cache
    assert world.check_store() == 4 * (len(longer) // 4)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("tokens", [3, 4, 5, 47, 48, 49, 64])
def test_a_prefill_with_one_token_saves_all_its_complete_blocks(
    world: "World", engines: "Callable[..., Engine]", asynchronous: bool, tokens: int
) -> None:
    """F5: its request has no block table in the next step."""
    one = engines(world, "a", tp=2, pp=2, asynchronous=asynchronous, extra={"pipeline_parallel_sizes": [1, 2]})
    one.ask((PROMPT * 2)[:tokens], max_tokens=1)
    assert world.check_store() == tokens // 4 * 4 * 2


def test_a_hit_leaves_the_last_token_to_compute(world: "World", engines: "Callable[..., Engine]") -> None:
    """A prompt of whole blocks that is completely stored: something must be sampled from."""
    engines(world, "a").ask(PROMPT[:48])
    assert engines(world, "b").ask(PROMPT[:48], max_tokens=3) == 44


def test_what_the_engine_has_itself_is_not_loaded(world: "World", engines: "Callable[..., Engine]") -> None:
    """A local prefix with an external tail: the load starts behind it, and its bytes fit together."""
    engines(world, "a").ask(PROMPT)
    two = engines(world, "b", tp=2)
    assert two.ask(PROMPT[:21], max_tokens=2) == 20
    assert two.ask(PROMPT, max_tokens=2) == 28
    assert two.metadata[-1].step.loads == ()
    assert [plan.first_block for m in two.metadata for plan in m.step.loads] == [0, 5]


@pytest.mark.parametrize("victim", ["s0p0", "s3p1", "s2p0"])
def test_one_missing_shard_ends_the_hit_for_every_size(
    world: "World", engines: "Callable[..., Engine]", victim: str
) -> None:
    """A11: one object of block 7, for whichever rank, and for readers of every size."""
    extra = {"pipeline_parallel_sizes": [1, 2]}
    engines(world, "a", tp=2, pp=2, extra=extra).ask(PROMPT)
    (block,) = {key.split("/")[-2] for key in world.store.keys if world.number(key) == 7}
    assert world.store.evict([key for key in world.store.keys if block in key and key.endswith(victim)]) == 1
    for name, tp, pp in (("b", 1, 1), ("c", 4, 1), ("d", 2, 2), ("e", 8, 1)):
        reader = engines(world, name, tp=tp, pp=pp, role="prefill", kv_role="kv_consumer", extra=extra)
        assert reader.ask(PROMPT) == 28
        world.store.evict(lambda key: block in key and key.endswith(victim))


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_save_and_each_load_completes_once(
    world: "World", engines: "Callable[..., Engine]", tp: int, pp: int
) -> None:
    """B16, C16: whatever the number of ranks, pins and loads end, and the metadata of every rank arrives."""
    extra = {"pipeline_parallel_sizes": [1, 2]}
    one = engines(world, "a", tp=tp, pp=pp, extra=extra)
    two = engines(world, "b", tp=3 - min(tp, 2), extra=extra)
    one.ask(PROMPT, max_tokens=6)
    two.ask(PROMPT)
    one.ask([1, *PROMPT])
    for engine in (one, two):
        assert (engine.used_blocks, engine.side._pins.jobs, engine.side._loads.in_flight) == (0, 0, 0)
    assert sum(len(m.step.saves) for m in one.metadata) > 2


def test_all_ranks_of_an_uneven_pipeline_have_one_namespace_and_read_what_was_written(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]"
) -> None:
    """F1: five layers on two stages, scheduler and ranks in one namespace; the second pass gets from the store."""
    from played_model import Shape

    world = new_world(Shape(layers=5))
    extra = {"pipeline_parallel_sizes": [1, 2]}
    one = engines(world, "a", tp=2, pp=2, extra=extra)
    one.ask(PROMPT)
    transfers = [rank.connector._worker_side._transfers for rank in one.ranks]
    used = {each.rank.namespace for each in transfers if each is not None}
    assert used == {one.side.decision.namespace}
    assert sorted(len(rank.layers) for rank in one.ranks) == [2, 2, 3, 3]
    assert one.pool.reset_prefix_cache()
    assert one.ask(PROMPT) == 48
    assert one.count("loaded_objects") == 4 * 12 * 2
    two = engines(world, "b", tp=4, pp=1, layout="BLHNC", extra=extra)
    assert two.side.decision.namespace == one.side.decision.namespace
    assert two.ask(PROMPT) == 48
    assert world.check_store() == 4 * 12 * 2


def test_a_load_that_always_fails_is_tried_once(world: "World", engines: "Callable[..., Engine]") -> None:
    """F3: all GETs fail, and the allocation after it is refused at first."""
    engines(world, "a").ask(PROMPT)
    two = engines(world, "b")
    two.faults.fail("get", codes.TRANSFER_FAIL, objects_only)
    allocate, refused = two.scheduler.kv_cache_manager.allocate_slots, [0]

    def refusing(request: Any, *args: Any, **kwargs: Any) -> Any:
        if two.side._lookups._bypassed and refused[0] < 5:
            refused[0] += 1
            return None
        return allocate(request, *args, **kwargs)

    two.scheduler.kv_cache_manager.allocate_slots = refusing
    assert two.ask(PROMPT, max_tokens=3) == 0
    assert refused[0] == 5
    assert two.loads_planned == 1
    assert not two.side._lookups._bypassed


def test_a_block_that_exists_and_cannot_be_read_costs_each_request_one_try(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """D15: metadata outlives data; what is in front of it is used all the same."""
    engines(world, "a").ask(PROMPT)
    two = engines(world, "b")
    (block,) = {key.split("/")[-2] for key in world.store.keys if world.number(key) == 5}
    two.faults.fail("get", codes.NOT_FOUND, lambda key: block in key)
    two.add("r", PROMPT)
    two.run()
    assert two.outputs["r"] == two.answer("r")[:1]
    assert two.loads_planned == 1
    two.add("s", [*PROMPT[:40], 1, 2, 3])
    two.run()
    assert two.outputs["s"] == two.answer("s")[:1]


def test_a_preempted_request_comes_back_with_a_store_hit(world: "World", engines: "Callable[..., Engine]") -> None:
    """C13: same answer as without interruption; its blocks have left the local cache meanwhile."""
    one = engines(world, "a", tp=2, blocks=40)
    one.add("r", PROMPT, max_tokens=60)
    one.step_until(lambda: len(one.outputs["r"]) >= 12 and one.side._pins.jobs == 0)
    request = one.scheduler.running.pop()
    one.scheduler._preempt_request(request, time.monotonic())
    assert one.pool.reset_prefix_cache()
    wait_until(lambda: not moving(one))
    one.run()
    assert one.outputs["r"] == one.answer("r")[:60]
    assert one.loads_planned == 1
    assert one.used_blocks == 0


def test_pins_are_few_and_never_take_blocks_from_serving(world: "World", engines: "Callable[..., Engine]") -> None:
    """F6: the store hangs; at most 5 % of the cache is pinned, saves are dropped, requests run on."""
    one = engines(world, "a", blocks=100, extra={"staging_bytes": 1 << 10})
    gate = one.faults.hang("put", objects_only)
    for number in range(12):
        one.add(f"r{number}", [number + 3] * 30, max_tokens=10)
    one.step_until(lambda: len(one.outputs["r11"]) == 10)
    assert 0 < one.side._pins.blocks <= 5
    assert one.used_blocks == one.side._pins.blocks
    assert all(one.outputs[r] == one.answer(r)[:10] for r in one.outputs)
    assert one.count("dropped_save_blocks") > 0
    gate.set()
    one.run()
    assert one.used_blocks == 0


def test_an_idle_engine_sleeps_while_the_store_hangs_and_looks_again_when_it_is_woken(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6: vLLM's processes spin while they step, so an engine with nothing but pins stops stepping after a while."""
    from kvshare_connector.scheduler import glue

    monkeypatch.setattr(glue, "NEWS_SECONDS", 0.1)
    one = engines(world, "a", extra={"staging_bytes": 1 << 10})
    gate = one.faults.hang("put", objects_only)
    one.add("r", PROMPT)
    one.step_until(lambda: one.outputs["r"] != [] and not one.connector.has_pending_push_work())
    assert one.side._pins.jobs > 0
    gate.set()
    monkeypatch.setattr(glue, "LOOK_AGAIN_SECONDS", 0.0)
    one.step_until(lambda: one.side._pins.jobs == 0)
    assert one.used_blocks == 0


def test_after_a_reset_nothing_of_before_is_found(world: "World", engines: "Callable[..., Engine]") -> None:
    """C10: and what is computed afterwards is stored and found again."""
    one = engines(world, "a", tp=2)
    one.ask(PROMPT)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    one.run()
    one.step_until(lambda: not one.side._resets.under_way)
    assert [key for key in world.store.keys if objects_only(key)] == []
    two = engines(world, "b")
    assert two.ask(PROMPT) == 0
    assert one.scheduler.reset_prefix_cache()
    assert one.ask(PROMPT) == 48


def test_a_save_under_way_at_a_reset_does_not_come_back(world: "World", engines: "Callable[..., Engine]") -> None:
    """C10, F4: the PUT lands long after the reset; reset answers False while blocks are pinned, and never raises."""
    one = engines(world, "a", tp=2, layout="BLHNC", extra={"staging_bytes": 1 << 10})
    one.faults.hang("put", objects_only)
    one.add("r", PROMPT)
    one.step_until(lambda: one.outputs["r"] != [] and one.side._pins.jobs > 0)
    assert one.scheduler.reset_prefix_cache(reset_connector=True) is False
    for _ in range(20):
        one.step()
    one.faults.clear()
    one.step_until(lambda: not one.side._resets.under_way)
    one.run()
    assert [key for key in world.store.keys if objects_only(key)] == []
    assert one.used_blocks == 0
    assert one.scheduler.reset_prefix_cache(reset_connector=True)


@pytest.mark.parametrize("preempt", [False, True])
def test_running_requests_do_not_bring_old_blocks_back(
    world: "World", engines: "Callable[..., Engine]", preempt: bool
) -> None:
    """F4: their blocks are from before the reset, unless the reset has preempted them."""
    one = engines(world, "a", tp=2)
    one.add("r", PROMPT, max_tokens=60)
    one.step_until(lambda: len(one.outputs["r"]) >= 9 and one.side._pins.jobs == 0)
    before = {key for key in world.store.keys if objects_only(key)}
    done = one.scheduler.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True)
    assert done is preempt
    one.step_until(lambda: not one.side._resets.under_way)
    one.run()
    after = {key for key in world.store.keys if objects_only(key)}
    assert (after == set()) is not preempt
    if not preempt:
        one.add("s", PROMPT)  # its blocks are in the engine's own cache still
        one.run()
        assert before.isdisjoint(world.store.keys)
    assert one.outputs["r"] == one.answer("r")[:60]


def test_what_a_master_has_lost_is_stored_again(world: "World", engines: "Callable[..., Engine]") -> None:
    """E5: a restart empties the store; an engine must not believe for ever that it has stored something."""
    one = engines(world, "a")
    one.ask(PROMPT)
    world.store.evict(objects_only)
    assert one.pool.reset_prefix_cache()
    one.ask(PROMPT)
    assert world.check_store() == 12 * 4


def test_swapped_and_null_blocks_are_not_saved_by_position(world: "World", engines: "Callable[..., Engine]") -> None:
    """C7: the table of the step decides, not what was there before."""
    one = engines(world, "a")
    one.add("r", PROMPT, max_tokens=1)
    true_tables = one.scheduler.kv_cache_manager.get_block_ids

    def with_null(request_id: str) -> tuple[list[int], ...]:
        (table,) = true_tables(request_id)
        return ([0 if i == 3 else block for i, block in enumerate(table)],)

    one.work_tables = true_tables
    one.scheduler.kv_cache_manager.get_block_ids = with_null
    one.run()
    saved = {n for m in one.metadata for job in m.step.saves for part in job.blocks for n in part.numbers}
    assert saved == set(range(12)) - {3}
    assert 0 not in {b for m in one.metadata for job in m.step.saves for b in job.block_ids}
    world.check_store()


def test_loads_are_always_asynchronous(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """C18: a synchronous load that fails gives wrong text on the newer runner."""
    engines(world, "a").ask(PROMPT)
    two = engines(world, "b")
    answers: list[tuple[int | None, bool]] = []
    ask = two.connector.get_num_new_matched_tokens

    def noting(request: Any, tokens: int) -> tuple[int | None, bool]:
        answers.append(ask(request, tokens))
        return answers[-1]

    monkeypatch.setattr(two.connector, "get_num_new_matched_tokens", noting)
    two.ask(PROMPT)
    assert answers[-1] == (48, True)
    assert set(answers[:-1]) <= {(None, False)}
    assert two.connector.has_pending_block_frees() is False
    assert two.connector.requires_kv_delivery is False


def test_a_store_that_hangs_costs_one_wait_and_never_a_step(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: the first lookup is given up after its time, later ones are misses at once; no call blocks."""
    from kvshare_connector.scheduler import probe

    one = engines(world, "a", extra={"lookup_timeout_seconds": 1})
    gate, hangs = one.faults.hang("exists"), threading.Event()
    one.faults.before("exists", lambda *_: hangs.set())
    started = time.monotonic()
    one.add("r", PROMPT)
    one.step_until(hangs.is_set)
    monkeypatch.setattr(probe, "HANGS_SECONDS", 0.1)
    one.step_until(lambda: one.outputs["r"] != [])
    assert time.monotonic() - started >= 1.0
    for number in range(5):
        one.add(f"s{number}", [number + 3] * 20)
    one.step_until(lambda: all(one.outputs.values()))
    assert (one.count("lookup_timeouts"), one.count("lookups_skipped") >= 5) == (1, True)
    gate.set()
    one.run()


def test_one_bad_node_fails_its_own_keys_only(world: "World", engines: "Callable[..., Engine]") -> None:
    """F7: eight loads, half of the blocks' keys on a node that fails: all end, and what could be read is used."""
    prompts = [[number + 3, *PROMPT[1:]] for number in range(8)]
    one = engines(world, "a", tp=2)
    for prompt in prompts:
        one.ask(prompt)
    two = engines(world, "b", tp=4)
    two.faults.fail("get", codes.TRANSFER_FAIL, lambda key: objects_only(key) and world.number(key) == 6)
    for number, prompt in enumerate(prompts):
        two.add(f"r{number}", prompt)
    two.run()
    assert all(two.outputs[r] == two.answer(r)[:1] for r in two.outputs)
    assert two.count("loaded_blocks") == 8 * 6 * 4


def test_an_arena_too_small_for_an_object_disables_caching(world: "World", engines: "Callable[..., Engine]") -> None:
    """D16: said in the verdict; no object is skipped silently, no step raises, the engine serves."""
    one = engines(world, "a", extra={"staging_bytes": 511})
    verdict = one.side.decision.verdict
    assert (verdict.state, verdict.reason) == ("disabled", "StagingTooSmall")
    assert one.ask(PROMPT, max_tokens=3) == 0
    assert world.store.keys == []


def test_a_rank_that_cannot_set_up_fails_its_loads_and_releases_its_saves(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """D5: whatever goes wrong in the step with the decision, the engine goes on."""
    from kvshare_connector.worker import glue

    engines(world, "a").ask(PROMPT)
    two = engines(world, "b", tp=2)

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("a fault of this test")

    monkeypatch.setattr(glue, "make_plan", broken)
    assert two.ask(PROMPT, max_tokens=9) == 0
    assert two.loads_planned == 1
    assert two.outputs["b-0"] == two.answer("b-0")[:9]
    assert two.used_blocks == 0
    assert two.scheduler.reset_prefix_cache(reset_connector=True)
    two.run()
    two.step_until(lambda: not two.side._resets.under_way)


@pytest.mark.parametrize(
    "broken",
    [
        "membership.engine_facts.engine_facts",
        "membership.decide",
        "membership.compat.current_none_hash",
        "glue.Question",
    ],
)
def test_an_error_of_ours_costs_the_cache_and_never_the_engine(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """D5: at the decision, at the first request, in a lookup."""

    def raising(*_: object, **__: object) -> Any:
        raise RuntimeError("a fault of this test")

    monkeypatch.setattr(f"kvshare_connector.scheduler.{broken}", raising)
    one = engines(world, "a")
    assert one.ask(PROMPT, max_tokens=3) == 0
    assert one.side.decision.verdict.reason == "InternalError"
    assert "a fault of this test" in one.side.decision.verdict.message or broken == "glue.Question"


def test_the_tensors_layout_counts_and_the_conflict_is_said(
    world: "World", engines: "Callable[..., Engine]", caplog: pytest.LogCaptureFixture
) -> None:
    """B15: head-major was asked for, the tensors are token-major; bytes are right all the same."""
    import logging

    logging.getLogger("kvshare_connector").propagate = True
    with caplog.at_level(logging.WARNING, "kvshare_connector"):
        one = engines(world, "a", layout="LBNHC", extra={"request_layout": "LBHNC"})
    assert "layout LBHNC was requested, rank 0 has LBNHC in its tensors" in caplog.text
    one.ask(PROMPT)
    assert world.check_store() == 48


def test_requests_leave_nothing_behind(world: "World", engines: "Callable[..., Engine]") -> None:
    """No dictionary grows with the number of requests, whichever way they end."""
    one = engines(world, "a", tp=2, blocks=60)
    one.faults.fail("get", codes.NOT_FOUND, objects_only, times=40)
    for number in range(30):
        one.add(f"r{number}", [*PROMPT[: 10 + number], number], max_tokens=1 + number % 5)
        for _ in range(number % 4):
            one.step()
        if number % 3 == 0:
            one.abort(f"r{number}")
    one.run()
    side = one.side
    sizes = [
        side._requests, side._first_block, side._outdated, side._unread, side._tail, side._saves._done,
        side._lookups._states, side._lookups._bypassed, side._loads._pending, side._loads._sent, side._loads._bad,
    ]  # fmt: skip
    assert [len(x) for x in sizes] == [0] * len(sizes)
    assert one.used_blocks == 0


def test_late_and_unknown_reports_are_ignored(world: "World", engines: "Callable[..., Engine]") -> None:
    """Rule 10: an assertion in the scheduler's process would kill the engine."""
    from kvshare_connector.wire import Report

    one = engines(world, "a")
    one.ask(PROMPT)
    output = SimpleNamespace(
        kv_connector_worker_meta=None,
        finished_recving={"stranger"},
        invalid_block_ids={1, 10**6},
        finished_sending=None,
    )
    one.connector.update_connector_output(output)
    one.side.output(Report(released={999: 1}, settled={7: 1}, unread=frozenset({b"x"})), [], frozenset())
    one.connector.request_finished_all_groups(
        SimpleNamespace(request_id="stranger", num_computed_tokens=0, num_tokens=1, num_prompt_tokens=1,
                        lora_request=None, block_hashes=[]), ([],)
    )  # fmt: skip
    assert one.ask([1, *PROMPT]) == 0


def test_a_forward_pass_that_raises_stores_nothing(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends the step in a ``finally``; the blocks that it should have computed hold anything."""
    engine = engines(world, "a", tp=2)

    def broken(item: object) -> None:
        raise RuntimeError("the device is gone")

    for rank in engine.ranks:
        monkeypatch.setattr(rank, "_forward", broken)
    engine.add("r", PROMPT)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.run()
    wait_until(lambda: not moving(engine))
    assert [key for key in world.store.keys if objects_only(key)] == []
