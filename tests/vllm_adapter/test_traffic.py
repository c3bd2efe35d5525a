"""Random traffic through vLLM's own schedulers: whatever happens, bytes are right and nothing is left behind."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from disturbances import random_traffic

if TYPE_CHECKING:
    from played_engine import Engine, World

#: (tp, pp, layout) of two engines that share.
PAIRS = [
    ((2, 1, "LBNHC"), (1, 1, "LBHNC")),
    ((4, 1, "BLHNC"), (2, 2, "LBNHC")),
    ((8, 1, "BHLNC"), (1, 2, "LHBNC")),
]


#: Windows of the layers, and how many blocks make a cache of a size that runs full.
MODELS = {"full": ((), 40), "windows": ((8, 8, 0), 110), "two windows": ((8, 0, 16), 110), "one window": ((8,), 30)}


@pytest.mark.parametrize(
    ("seed", "model"),
    [
        *((seed, "full") for seed in range(6)),
        *((seed, "windows") for seed in range(6)),
        (6, "two windows"),
        (7, "one window"),
    ],
)
def test_random_traffic(
    new_world: "Callable[..., World]", engines: "Callable[..., Engine]", seed: int, model: str
) -> None:
    """B3, B16, D6, F9: two topologies, small caches, preemptions, aborts, evictions and every kind of store error.

    The engines check each token that they are told to be computed, and in the end each stored object.
    """
    dice = random.Random(seed)
    from played_model import Shape

    windows, blocks = MODELS[model]
    world = new_world(Shape(layers=6 if windows else 4, windows=windows))
    first, second = PAIRS[seed % len(PAIRS)]
    extra = {"pipeline_parallel_sizes": [1, 2]}
    made = [
        engines(world, name, tp=tp, pp=pp, layout=layout, blocks=blocks, asynchronous=bool(seed % 2), extra=extra)
        for name, (tp, pp, layout) in (("a", first), ("b", second))
    ]
    random_traffic(dice, world, made, lambda: (dice.randrange(8, 41), dice.randrange(0, 14)))
