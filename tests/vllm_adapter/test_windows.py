"""Windows beside full attention: vLLM's own cache managers recycle blocks, and what the store holds stays right.

The shape has blocks of 4 tokens and windows of 8, of which a hit needs the last two blocks. Two of three layers have a
window, so that vLLM makes two cache groups of them and one of full attention, in the same memory.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

BLOCK, WINDOW, HEADS = 4, 8, 4
PROMPT = [3 + n * 7 % 90 for n in range(150)]


@pytest.fixture
def hybrid(new_world: "Callable[..., World]") -> "World":
    """A world whose model has windows."""
    from played_model import Shape

    return new_world(Shape(layers=6, windows=(WINDOW, WINDOW, 0)))


@pytest.fixture
def engines(engines: "Callable[..., Engine]") -> "Callable[..., Engine]":
    """Engines with room for the pins of three groups."""
    return lambda *args, **kwargs: engines(*args, **{"blocks": 4000, **kwargs})


def wait_until(condition: Callable[[], bool]) -> None:
    """Let the transfer threads work."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def objects(world: "World", kind: str = "") -> list[str]:
    """Keys of the objects of a kind."""
    return [key for key in world.store.keys if f"/k{kind}" in key]


def of_window(key: str) -> bool:
    """Whether a key is of a window."""
    return "/kwindow" in key


def test_the_engine_has_three_groups_of_two_kinds(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """What the other tests here rest on."""
    one = engines(hybrid, "a", tp=2)
    decision = one.side.decision
    assert (decision.verdict.state, decision.verdict.reason) == ("shared", "Shared")
    assert [(kind.name, kind.layers) for kind in decision.kinds] == [("full", (2, 5)), ("window8-", (0, 1, 3, 4))]
    assert sorted(map(len, decision.groups)) == [1, 2]


LENGTHS = [n + d for n in (BLOCK, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 5 * WINDOW) for d in (-1, 0, 1)]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((2, "LBNHC"), (1, "LBHNC")),
        ((1, "LBHNC"), (2, "LBNHC")),
        ((4, "BLHNC"), (8, "BHLNC")),
        ((8, "LHBNC"), (4, "BLNHC")),
    ],
)
def test_prompts_around_windows_and_blocks_are_found_by_another_size(
    hybrid: "World", engines: "Callable[..., Engine]", writer: tuple[int, str], reader: tuple[int, str]
) -> None:
    """Shorter than, equal to and several times the window, at every boundary and one token beside it."""
    one = engines(hybrid, "a", tp=writer[0], layout=writer[1])
    two = engines(hybrid, "b", tp=reader[0], layout=reader[1], group_order=-1)
    assert one.side.decision.namespace == two.side.decision.namespace
    for number, length in enumerate(sorted(set(LENGTHS))):
        prompt = [number + 3, *PROMPT[1:length]]
        assert one.ask(prompt, max_tokens=3) == 0
        assert two.ask(prompt, max_tokens=9) == (length - 1) // BLOCK * BLOCK
    assert hybrid.check_store() == len(objects(hybrid))


def test_every_block_of_a_window_is_saved_before_the_engine_recycles_it(
    hybrid: "World", engines: "Callable[..., Engine]"
) -> None:
    """A prompt in three chunks and an answer: most blocks of the window are gone from its table at the end."""
    one = engines(hybrid, "a", tp=2)
    one.ask(PROMPT, max_tokens=20)
    blocks = (len(PROMPT) + 19) // BLOCK
    assert len(objects(hybrid, "full")) == len(objects(hybrid, "window")) == blocks * HEADS
    assert hybrid.check_store() == 2 * blocks * HEADS
    saved = [b for m in one.metadata for job in m.step.saves for b in job.block_ids]
    assert 0 not in saved
    assert one.used_blocks == 0


def test_windows_have_the_room_for_pins_first(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """Pins for 80 blocks of the cache and chunks that need 48: full attention waits, no block of a window is lost."""
    one = engines(hybrid, "a", tp=2, blocks=1600, extra={"staging_bytes": 1 << 11})
    gate = one.faults.hang("put", lambda key: "/k" in key)
    one.add("r", PROMPT[:128], max_tokens=30)
    one.step_until(lambda: len(one.outputs["r"]) > 2)
    assert one.side._pins.blocks == 80
    gate.set()
    one.run()
    saved = {part.kind: set[int]() for m in one.metadata for job in m.step.saves for part in job.blocks}
    for metadata in one.metadata:
        for job in metadata.step.saves:
            for part in job.blocks:
                saved[part.kind] |= set(part.numbers)
    assert saved["window8-"] >= set(range(32))
    assert saved["full"] >= set(range(32))
    assert hybrid.check_store() == len(objects(hybrid))


def test_bytes_written_are_the_unique_bytes(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """Two engines and repeated prompts: every object goes to the store once."""
    one, two = engines(hybrid, "a", tp=2), engines(hybrid, "b", tp=4)
    for engine in (one, two, one):
        engine.ask(PROMPT, max_tokens=2)
    for engine in (one, two):
        assert engine.pool.reset_prefix_cache()
        engine.ask([*PROMPT, 5, 6, 7], max_tokens=2)
    total = sum(map(len, (hybrid.store.contents.objects[key] for key in objects(hybrid))))
    assert one.count("saved_bytes") + two.count("saved_bytes") == total


def test_a_load_brings_the_last_blocks_of_a_window_only(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """37 blocks of full attention and two of the window; keys are counted by kind."""
    engines(hybrid, "a").ask(PROMPT)
    two = engines(hybrid, "b", tp=2)
    assert two.ask(PROMPT) == 37 * BLOCK
    (plan,) = (plan for m in two.metadata for plan in m.step.loads)
    assert [(part.kind, part.numbers) for part in plan.blocks] == [
        ("full", tuple(range(37))),
        ("window8-", (35, 36)),
    ]
    assert [len(part.tables) for part in plan.blocks] == [1, 2]
    assert plan.whole
    assert 0 not in plan.block_ids
    assert two.count("lookup_keys:full") == 37 * HEADS
    assert two.count("lookup_keys:window8") == 2 * HEADS


def test_a_longer_local_hit_is_completed(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """The engine has a shorter prefix itself, whose window is another one; only what lies behind it is loaded."""
    engines(hybrid, "a").ask(PROMPT)
    two = engines(hybrid, "b", tp=2)
    two.ask(PROMPT[:50], max_tokens=1)
    before = two.loads_planned
    assert two.ask(PROMPT) == 37 * BLOCK - 48
    plan = [plan for m in two.metadata for plan in m.step.loads][before]
    assert [part.numbers for part in plan.blocks] == [tuple(range(12, 37)), (35, 36)]
    assert two.ask(PROMPT[:56]) in (0, 4)  # one block behind the local hit, whose window is partly here


@pytest.mark.parametrize("gone", [0, 10, 34, 35, 36])
def test_a_missing_block_of_a_window_shortens_the_hit_to_the_longest_valid_one(
    hybrid: "World", engines: "Callable[..., Engine]", gone: int
) -> None:
    """Blocks far behind the window do not matter; one inside it moves the end in front of it."""
    engines(hybrid, "a", tp=2).ask(PROMPT)
    hybrid.store.evict(lambda key: of_window(key) and hybrid.number(key) == gone and "s2p0" in key)
    found = engines(hybrid, "b", tp=4).ask(PROMPT, max_tokens=5)
    assert found == (37 if gone < 35 else gone) * BLOCK
    hybrid.check_store()


def test_a_prompt_whose_windows_have_left_the_store_is_computed_and_stored_again(
    hybrid: "World", engines: "Callable[..., Engine]"
) -> None:
    """Nothing of full attention is used alone; afterwards the hit is there."""
    one = engines(hybrid, "a", tp=2)
    one.ask(PROMPT)
    hybrid.store.evict(of_window)
    two = engines(hybrid, "b", tp=4)
    assert two.ask(PROMPT) == 0
    assert two.loads_planned == 0
    assert engines(hybrid, "c").ask(PROMPT) == 37 * BLOCK
    # The writer itself learns of it when it looks.
    hybrid.store.evict(of_window)
    assert one.pool.reset_prefix_cache()
    assert one.ask(PROMPT) == 0
    assert engines(hybrid, "d").ask(PROMPT) == 37 * BLOCK


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("bad", ["/kfull", "/kwindow"])
def test_a_load_that_fails_is_computed_from_the_start(
    hybrid: "World", engines: "Callable[..., Engine]", bad: str, asynchronous: bool
) -> None:
    """D2: reported by request, never by block; nothing of the load is used, whichever kind it was that failed."""
    engines(hybrid, "a").ask(PROMPT)
    two = engines(hybrid, "b", tp=2, asynchronous=asynchronous)
    two.faults.fail("get", codes.TRANSFER_FAIL, lambda key: bad in key and "s3p0" in key and hybrid.number(key) == 36)
    assert two.ask(PROMPT, max_tokens=9) == 0
    assert two.count("failed_loads") == two.loads_planned == 1
    assert two.count("hit_tokens") == 0
    assert two.used_blocks == 0
    two.faults.clear()
    assert two.ask([4, *PROMPT[1:]], max_tokens=3) == 0
    hybrid.check_store()


def test_a_failed_load_falls_back_to_the_local_hit(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """What the engine has itself is not lost with the load."""
    engines(hybrid, "a").ask(PROMPT)
    two = engines(hybrid, "b", tp=2)
    two.ask(PROMPT[:50])
    two.faults.fail("get", codes.NOT_FOUND, of_window)
    two.add("r", PROMPT, max_tokens=4)
    two.run()
    assert two.outputs["r"] == two.answer("r")[:4]
    assert two.used_blocks == 0


def test_a_rank_that_cannot_set_up_fails_its_loads(
    hybrid: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """D5: by request too."""
    from kvshare_connector.worker import glue

    engines(hybrid, "a").ask(PROMPT)
    two = engines(hybrid, "b", tp=2)

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("a fault of this test")

    monkeypatch.setattr(glue, "make_plan", broken)
    assert two.ask(PROMPT, max_tokens=9) == 0
    assert two.loads_planned == 1
    assert two.used_blocks == 0


def test_a_null_block_where_a_load_must_go_fails_the_load(
    hybrid: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine promised a block; without one nothing is written anywhere, and the request is computed."""
    engines(hybrid, "a").ask(PROMPT)
    two = engines(hybrid, "b", tp=2)
    allocated = two.connector._scheduler_side.allocated

    def with_null(request: Any, tables: Sequence[list[int]], tokens: int) -> None:
        cut = [
            [0 if len(table) - 2 == i and group else b for i, b in enumerate(table)]
            for group, table in enumerate(tables)
        ]
        allocated(request, cut, tokens)

    monkeypatch.setattr(two.connector._scheduler_side, "allocated", with_null)
    assert two.ask(PROMPT, max_tokens=3) == 0
    assert two.count("failed_loads") == 1


@pytest.mark.parametrize("layout", ["BLHNC", "LBNHC"])
def test_blocks_that_a_window_has_passed_are_not_reused_while_they_are_saved(
    hybrid: "World", engines: "Callable[..., Engine]", layout: str
) -> None:
    """The store hangs while the request decodes on and others want its blocks: pins hold them, bytes are right."""
    one = engines(hybrid, "a", tp=2, layout=layout, blocks=120, extra={"staging_bytes": 1 << 10})
    gate = one.faults.hang("put", of_window)
    one.add("r", PROMPT[:40], max_tokens=60)
    one.step_until(lambda: len(one.outputs["r"]) > 40)
    assert 0 < one.side._pins.blocks <= 6
    for number in range(6):
        one.add(f"s{number}", [number + 3] * 40, max_tokens=20)
    one.step_until(lambda: all(len(one.outputs[f"s{n}"]) == 20 for n in range(6)))
    gate.set()
    one.run()
    assert hybrid.check_store() > 0
    assert one.used_blocks == 0
    assert engines(hybrid, "b").ask(PROMPT[:40], max_tokens=3) >= 0


def test_an_abort_while_loading_frees_everything_once(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """D6: the blocks wait for the report, whether the load then works or fails."""
    engines(hybrid, "a").ask(PROMPT)
    two = engines(hybrid, "b", tp=2)
    for fails in (False, True):
        gate = two.faults.hang("get", of_window)
        two.add(f"r{fails}", PROMPT)
        two.step_until(lambda: two.side._loads.in_flight == 1)
        assert two.used_blocks > 0
        two.abort(f"r{fails}")
        for _ in range(5):
            two.step()
        if fails:
            two.faults.fail("get", codes.TRANSFER_FAIL)
        gate.set()
        two.run()
        two.faults.clear()
        wait_until(lambda: not two.transfers_open)
        two.step_until(lambda: two.used_blocks == 0)
    assert two.ask(PROMPT, max_tokens=3) >= 0
    hybrid.check_store()


def test_a_reset_during_a_load_proves_nothing_of_it(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """C10: what was on its way is void; the request is computed, and old keys do not come back."""
    engines(hybrid, "a").ask(PROMPT)
    two = engines(hybrid, "b", tp=2)
    gate = two.faults.hang("get", of_window)
    two.add("r", PROMPT, max_tokens=3)
    two.step_until(lambda: two.side._loads.in_flight == 1)
    assert two.scheduler.reset_prefix_cache(reset_connector=True) is False
    for _ in range(5):
        two.step()
    gate.set()
    two.run()
    two.step_until(lambda: not two.side._resets.under_way)
    assert two.outputs["r"] == two.answer("r")[:3]
    assert two.count("hit_tokens") == 0
    hybrid.check_store()


def test_a_preempted_request_comes_back_with_a_store_hit(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """C13: its blocks have left the local cache meanwhile."""
    one = engines(hybrid, "a", tp=2, blocks=2000)
    one.add("r", PROMPT[:50], max_tokens=60)
    one.step_until(lambda: len(one.outputs["r"]) >= 12 and one.side._pins.jobs == 0)
    request = one.scheduler.running.pop()
    one.scheduler._preempt_request(request, time.monotonic())
    assert one.pool.reset_prefix_cache()
    wait_until(lambda: not one.transfers_open)
    one.run()
    assert one.outputs["r"] == one.answer("r")[:60]
    assert one.loads_planned == 1
    assert one.used_blocks == 0


@pytest.mark.parametrize("windows", [(8, 0, 16), (8,), (0, 4, 1), (3, 0), (400, 0)])
def test_other_mixtures_of_windows(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]", windows: tuple[int, ...]
) -> None:
    """Two windows beside full attention, windows alone, windows of a block, of one token, and beyond every prompt."""
    from played_model import Shape

    world = new_world(Shape(layers=6, windows=windows))
    one, two = engines(world, "a", tp=2), engines(world, "b", tp=4, layout="BLHNC", asynchronous=True)
    assert len(one.side.decision.kinds) == len(set(windows))
    for number, length in enumerate((7, 8, 9, 16, 17, 33, 150)):
        prompt = [number + 3, *PROMPT[1:length]]
        one.ask(prompt, max_tokens=3)
        assert two.ask(prompt, max_tokens=9) == (length - 1) // BLOCK * BLOCK
    assert world.check_store() == len(objects(world))
    two.faults.fail("get", codes.TRANSFER_FAIL, lambda key: world.number(key) == 36)
    assert two.pool.reset_prefix_cache()
    assert two.ask(prompt, max_tokens=9) == 0
    assert two.used_blocks == 0


def test_windows_share_across_pipeline_stages(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """A stage is cut for every kind; ranks that hold no layer of a kind have nothing of it to load."""
    extra = {"pipeline_parallel_sizes": [1, 2, 3]}
    one = engines(hybrid, "a", tp=2, pp=3, extra=extra)
    assert one.side.decision.verdict.state == "shared", one.side.decision.verdict
    two = engines(hybrid, "b", tp=1, pp=2, layout="LBHNC", extra=extra)
    one.ask(PROMPT, max_tokens=3)
    assert two.ask(PROMPT, max_tokens=3) == 37 * BLOCK
    hybrid.check_store()


def test_an_isolated_member_reads_what_it_has_stored_itself(hybrid: "World", engines: "Callable[..., Engine]") -> None:
    """A wrong configuration: rank-local objects, one of each kind, under its own namespace."""
    extra = {"store_tp_size": 3}
    one = engines(hybrid, "a", tp=2, extra=extra)
    assert one.side.decision.verdict.state == "isolated"
    one.ask(PROMPT, max_tokens=3)
    assert one.pool.reset_prefix_cache()
    assert one.ask(PROMPT, max_tokens=3) == 37 * BLOCK
    assert engines(hybrid, "b", tp=4, extra=extra).ask(PROMPT) == 0


@pytest.mark.parametrize(("writer", "reader"), [((2, "BLHNC"), (4, "LBHNC")), ((1, "LBHNC"), (2, "BHLNC"))])
def test_direct_transfers_take_each_layer_from_the_block_of_its_group(
    hybrid: "World",
    engines: "Callable[..., Engine]",
    monkeypatch: pytest.MonkeyPatch,
    writer: tuple[int, str],
    reader: tuple[int, str],
) -> None:
    """Where pieces are large the store reads and writes the cache itself; here every piece counts as large."""
    from kvshare_connector.worker import plan

    monkeypatch.setitem(plan.DIRECT_PIECE_BYTES, "tcp", 1)
    one = engines(hybrid, "a", tp=writer[0], layout=writer[1])
    two = engines(hybrid, "b", tp=reader[0], layout=reader[1], group_order=-1)
    for number, length in enumerate((9, 33, 150)):
        prompt = [number + 3, *PROMPT[1:length]]
        one.ask(prompt, max_tokens=3)
        assert two.ask(prompt, max_tokens=9) == (length - 1) // BLOCK * BLOCK
    movers = [rank.connector._worker_side._transfers for engine in (one, two) for rank in engine.ranks]
    pieces = [piece for mover in movers if mover for planned in mover.rank.plan.objects for piece in planned.pieces]
    assert {piece.group for piece in pieces} == {0, 1}
    assert hybrid.check_store() == len(objects(hybrid))


def test_bytes_of_a_window_that_have_changed_in_the_store_are_found_and_computed(
    hybrid: "World", engines: "Callable[..., Engine]"
) -> None:
    """With digests nothing of a load is used unless all of it is what was saved; the torn object is removed."""
    extra = {"verify": "checksum"}
    engines(hybrid, "a", tp=2, extra=extra).ask(PROMPT)
    (torn,) = (key for key in objects(hybrid, "window") if hybrid.number(key) == 36 and "s1p0" in key)
    data = hybrid.store.contents.objects[torn]
    hybrid.store.contents.objects[torn] = bytes([data[0] ^ 1]) + data[1:]
    two = engines(hybrid, "b", tp=4, extra=extra)
    assert two.ask(PROMPT, max_tokens=3) == 0
    assert two.count("failed_loads") == 1
    assert hybrid.store.contents.objects[torn] == data
    assert engines(hybrid, "c", extra=extra).ask(PROMPT) == 37 * BLOCK
