"""Played engines on a real Mooncake that goes wrong: every byte that is said to be loaded is checked before it is used.

TP 2 with a token-major cache and TP 1 with a head-major one, vLLM's own schedulers, small caches. ``make test-faults``
does the same with real engines.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from testbed import mooncake, store_faults

if TYPE_CHECKING:
    from played_engine import Engine, World
    from played_model import Shape

pytestmark = pytest.mark.mooncake

#: Seconds in which hits must come back after a fault.
RECOVERY_SECONDS = 60.0
TRAFFIC_SECONDS = 3
SEGMENT = "24mb"

_prompts = itertools.count()


class Pair:
    """Two engines that share, and their store."""

    def __init__(
        self, folder: Path, store: mooncake.Store, world: "World", make: "Callable[..., Engine]", verify: str
    ) -> None:
        self.folder, self.store, self.world = folder, store, world
        self.engines = tuple(
            make(
                world, f"tp{tp}", tp=tp, layout=layout, blocks=70, asynchronous=True,
                extra={"master_server_address": store.address, "verify": verify},
            )
            for tp, layout in ((2, "LBNHC"), (1, "LBHNC"))
        )  # fmt: skip
        self.dice = random.Random(7)
        self.families = [self.fresh(40) for _ in range(4)]

    def fresh(self, length: int) -> list[int]:
        """A prompt that nobody has asked before."""
        number = next(_prompts)
        return [3 + (number * 7 + i * i + number * i) % 90 for i in range(length - 2)] + [
            3 + number % 90,
            3 + number // 90,
        ]

    def traffic(self, seconds: float) -> int:
        """Requests on both engines for some time; each engine checks what it is told to have."""
        end, asked = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            for engine in self.engines:
                if len(engine.scheduler.requests) < 8:
                    asked += 1
                    prompt = [*self.dice.choice(self.families)[: self.dice.randrange(8, 41)], *self.fresh(9)]
                    engine.add(f"t{asked}-{next(_prompts)}", prompt, max_tokens=self.dice.randrange(1, 12))
                engine.step()
        return asked

    def rest(self) -> None:
        """Let every request end."""
        for engine in self.engines:
            engine.run(seconds=60)

    def recovered(self) -> float:
        """Seconds until each engine has taken blocks that the other has just computed."""
        since, waiting = time.monotonic(), [self.engines, self.engines[::-1]]
        while waiting:
            prompt = self.fresh(41)
            first, second = waiting[0]
            first.ask(prompt)
            time.sleep(0.3)
            if second.ask(prompt) > 0:
                waiting.pop(0)
            elif time.monotonic() - since > RECOVERY_SECONDS:
                raise AssertionError(f"no hits {RECOVERY_SECONDS:.0f} s after the end of the fault")
        return time.monotonic() - since

    def count(self, name: str) -> float:
        """A counter of both engines."""
        return sum(engine.count(name) for engine in self.engines)


Fault = Callable[[Pair], AbstractContextManager[None]]


@contextlib.contextmanager
def node_hangs(pair: Pair) -> Iterator[None]:
    """One of two nodes stands still, its connections stay open."""
    pair.store.nodes[0].process.pause()
    try:
        yield
    finally:
        pair.store.nodes[0].process.resume()


@contextlib.contextmanager
def nodes_die(pair: Pair) -> Iterator[None]:
    """One of two nodes is killed, then the other; a new one joins."""
    pair.store.nodes[0].process.kill()
    pair.traffic(3)
    pair.store.nodes[1].process.kill()
    yield
    pair.store.nodes = [
        mooncake.start_node(pair.folder, pair.store.master, segment=SEGMENT, name=f"later-{number}")
        for number in range(2)
    ]


@contextlib.contextmanager
def master_dies(pair: Pair) -> Iterator[None]:
    """The master is killed; a new one, without any key, takes its port."""
    pair.store.master.process.kill()
    yield
    pair.store.master = mooncake.start_master(pair.folder, port=pair.store.master.port, lease_ms=2000)


@contextlib.contextmanager
def master_hangs(pair: Pair) -> Iterator[None]:
    """The master stands still, its connections stay open."""
    pair.store.master.process.pause()
    try:
        yield
    finally:
        pair.store.master.process.resume()


FAULTS: dict[str, Fault] = {
    "a node hangs and goes on": node_hangs,
    "a node dies, then the last one": nodes_die,
    "the master dies and starts again": master_dies,
    "the master hangs and goes on": master_hangs,
    "the store is full": lambda pair: store_faults.full(pair.store),
    "everything is evicted all the time": lambda pair: store_faults.pressed(pair.store),
    "objects of another size": lambda pair: store_faults.changed(pair.store, lambda data: data + b"x"),
    "shorter objects": lambda pair: store_faults.changed(pair.store, lambda data: data[:-1]),
}


@contextlib.contextmanager
def running(folder: Path, configs: "Callable[[Shape], Any]", verify: str) -> Iterator[Pair]:
    """Two engines on a store of their own."""
    from played_engine import Engine, World
    from played_model import Shape

    made: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    with mooncake.store(folder, nodes=2, segment=SEGMENT, lease_ms=2000) as store:
        try:
            yield Pair(folder, store, World(configs(Shape()), Shape()), make, verify)
        finally:
            for engine in made:
                engine.close()


@pytest.fixture(scope="module")
def pair(vllm_configs: "Callable[[Shape], Any]", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One pair for all faults, one after the other: each must leave it able to share."""
    with running(tmp_path_factory.mktemp("faults"), vllm_configs, "size") as made:
        yield made


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_wrong_is_used_and_sharing_comes_back(pair: Pair, name: str) -> None:
    """Requests go on during the fault, and hits come back without a restart."""
    pair.traffic(1)
    with FAULTS[name](pair):
        asked = pair.traffic(TRAFFIC_SECONDS)
    pair.rest()
    seconds = pair.recovered()
    print(f"{name}: {asked} requests, hits after {seconds:.1f} s, {pair.count('failed_keys'):.0f} keys failed")
    assert asked > 0
    for engine in pair.engines:
        assert all(answer == engine.answer(id_)[: len(answer)] for id_, answer in engine.outputs.items())


def test_everything_that_is_stored_after_all_faults_is_right(pair: Pair) -> None:
    """Each object in the store against the bytes that its tokens give."""
    prompt = pair.fresh(41)
    pair.engines[0].ask(prompt)
    pair.rest()
    with store_faults.client(pair.store) as client:
        stored = {key: client.get_bytes(key) for key in pair.store.master.keys() if "/kfull" in key}  # noqa: SIM118
    pair.world.store.contents.objects = {key: data for key, data in stored.items() if data is not None}
    assert pair.world.check_store() > 0


def test_bytes_that_change_at_rest_are_found_with_checksums(
    vllm_configs: "Callable[[Shape], Any]", tmp_path: Path
) -> None:
    """One flipped byte in half of all objects: found on load, computed, saved again, and loaded by the other size."""

    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[len(data) // 3] ^= 4
        return bytes(changed)

    with running(tmp_path, vllm_configs, "checksum") as pair:
        pair.traffic(1)
        with store_faults.changed(pair.store, flip):
            pair.traffic(TRAFFIC_SECONDS)
        pair.rest()
        pair.recovered()
        assert pair.count("failed_keys:get:CHECKSUM_MISMATCH") > 0
        assert pair.count("loaded_blocks") > 0
