"""Disturbances: random traffic of two played engines, and what goes wrong in it."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World


def random_traffic(
    dice: random.Random,
    world: "World",
    made: "Sequence[Engine]",
    cut: Callable[[], tuple[int, int]],
    *,
    evicted: float = 1.0,
) -> None:
    """Sixty prompts with common beginnings while things go wrong; then every answer, block and object is right.

    Args:
        dice: decides everything.
        world: of the engines.
        made: two engines.
        cut: how many tokens of a common beginning a prompt has, and how many of its own.
        evicted: makes evictions smaller where blocks have many objects.
    """
    for engine in made:
        engine.faults.before("get", _slow_and_forgetful(random.Random(dice.random()), world))
    prefixes = [[dice.randrange(3, 90) for _ in range(40)] for _ in range(2)]
    for number in range(60):
        engine = made[dice.randrange(2)]
        common, own = cut()
        engine.add(f"r{number}", dice.choice(prefixes)[:common] + [number % 90] * own, max_tokens=dice.randrange(1, 20))
        for _ in range(dice.randrange(0, 12)):
            made[dice.randrange(2)].step()
        _disturb(dice, world, made, evicted)
    for engine in made:
        engine.faults.clear()
    _all_is_right(world, made)


def traffic_with_aborts(
    dice: random.Random, world: "World", made: "Sequence[Engine]", *, longest: int, requests: int
) -> None:
    """Prompts with one common beginning, every fifth aborted; then every answer, block and object is right.

    Args:
        dice: decides everything.
        world: of the engines.
        made: the engines.
        longest: tokens of the common beginning, of which a prompt has at least 8.
        requests: how many.
    """
    prefix = [dice.randrange(3, 90) for _ in range(longest)]
    for number in range(requests):
        engine = dice.choice(made)
        engine.add(f"r{number}", [*prefix[: dice.randrange(8, longest + 1)], number], max_tokens=dice.randrange(1, 30))
        for _ in range(dice.randrange(0, 12)):
            dice.choice(made).step()
        if number % 5 == 0:
            engine.abort(f"r{number}")
    _all_is_right(world, made)


def _all_is_right(world: "World", made: "Sequence[Engine]") -> None:
    for engine in made:
        engine.run()
        assert engine.used_blocks == 0, engine.describe()
        for request_id, answer in engine.outputs.items():
            assert answer == engine.answer(request_id)[: len(answer)]
    assert world.check_store() > 0


def _slow_and_forgetful(dice: random.Random, world: "World") -> Callable[[str, Sequence[str]], None]:
    """Reads take their time, and objects leave between the lookup and the read."""

    def hook(_: str, asked: Sequence[str]) -> None:
        time.sleep(dice.random() * 0.01)
        if dice.random() < 0.2:
            world.store.evict(dice.sample(list(asked), min(3, len(asked))))

    return hook


def _disturb(dice: random.Random, world: "World", made: "Sequence[Engine]", evicted: float) -> None:
    """One of the things that go wrong."""
    engine = made[dice.randrange(2)]
    match dice.randrange(8):
        case 0:
            world.store.evict(lambda key: dice.random() < 0.2 * evicted)
        case 1:
            engine.faults.fail("get", dice.choice([codes.NOT_FOUND, codes.LEASE_EXPIRED, codes.TRANSFER_FAIL]), times=1)
        case 2:
            engine.faults.fail("put", dice.choice([codes.NO_SPACE, codes.TRANSFER_FAIL]), times=2)
        case 3:
            engine.faults.shorten(1, times=1)
        case 4:
            living = [r for r in engine.scheduler.requests.values() if not r.is_finished()]
            loading = [r for r in living if r.status.name == "WAITING_FOR_REMOTE_KVS"]
            if living:
                engine.abort(dice.choice(loading or living).request_id)
        case 5 | 6:
            world.store.evict(lambda key: dice.random() < 0.5 * evicted)
        case 7:
            engine.faults.fail("exists", codes.RPC_FAIL, times=3)
