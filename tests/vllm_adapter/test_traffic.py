"""Random traffic through vLLM's own schedulers: whatever happens, bytes are right and nothing is left behind."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from kvshare_connector.store import codes

if TYPE_CHECKING:
    from played_engine import Engine, World

#: (tp, pp, layout) of two engines that share.
PAIRS = [
    ((2, 1, "LBNHC"), (1, 1, "LBHNC")),
    ((4, 1, "BLHNC"), (2, 2, "LBNHC")),
    ((8, 1, "BHLNC"), (1, 2, "LHBNC")),
]


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(new_world: "Callable[..., World]", engines: "Callable[..., Engine]", seed: int) -> None:
    """B3, B16, D6, F9: two topologies, small caches, preemptions, aborts, evictions and every kind of store error.

    The engines check each token that they are told to be computed, and in the end each stored object.
    """
    dice = random.Random(seed)
    world = new_world()
    first, second = PAIRS[seed % len(PAIRS)]
    extra = {"pipeline_parallel_sizes": [1, 2]}
    made = [
        engines(world, name, tp=tp, pp=pp, layout=layout, blocks=40, asynchronous=bool(seed % 2), extra=extra)
        for name, (tp, pp, layout) in (("a", first), ("b", second))
    ]
    for engine in made:
        engine.faults.before("get", _slow_and_forgetful(random.Random(seed), world))
    prefixes = [[dice.randrange(3, 90) for _ in range(40)] for _ in range(2)]
    for number in range(60):
        engine = made[dice.randrange(2)]
        prompt = dice.choice(prefixes)[: dice.randrange(8, 41)] + [number % 90] * dice.randrange(0, 14)
        engine.add(f"r{number}", prompt, max_tokens=dice.randrange(1, 20))
        for _ in range(dice.randrange(0, 12)):
            made[dice.randrange(2)].step()
        _disturb(dice, world, made)
    for engine in made:
        engine.faults.clear()
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


def _disturb(dice: random.Random, world: "World", made: "list[Engine]") -> None:
    """One of the things that go wrong."""
    engine = made[dice.randrange(2)]
    match dice.randrange(8):
        case 0:
            world.store.evict(lambda key: dice.random() < 0.2)
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
            world.store.evict(lambda key: dice.random() < 0.5)
        case 7:
            engine.faults.fail("exists", codes.RPC_FAIL, times=3)
