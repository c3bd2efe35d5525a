"""One thing at a time goes wrong under steady traffic: no wrong token, no failed request, and sharing comes back."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testbed import reliability, store_faults
from testbed.completions import Server
from testbed.fault_trials import (
    NAMESPACE,
    PLAIN,
    Pair,
    Setup,
    hanging_up,
    judge,
    killing_a_node,
    killing_the_master,
    losing_objects,
    pair,
    start_engine,
)
from testbed.faulty_connector import FaultSettings
from testbed.reliability import trial
from testbed.tiny_llama import TinyModel
from testbed.tiny_model import tiny_model
from testbed.traffic import Expected, Member, Traffic

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both engines, and the latencies of a run without any fault."""
    with pair(tmp_path_factory.mktemp("faults"), reliability.answers()) as made:
        reliability.measure_calm(made, "calm", "nothing")
        yield made


def reset_caches(server: Server, *, external: str, running: str) -> None:
    """Empty an engine's own cache; with ``external`` the store's too, with ``running`` although requests run.

    vLLM refuses (500) to do so for running requests while one of them loads; the next time it may be willing.
    """
    answer = httpx.post(
        f"{server.url}/reset_prefix_cache",
        params={"reset_external": external, "reset_running_requests": running},
        timeout=30,
    )
    assert answer.status_code == 200 or (running == "true" and answer.status_code == 500), answer.text


def test_sharing_works_while_nothing_goes_wrong(engines: Pair) -> None:
    """The yardstick: both engines load what the other has saved, without one failed key."""
    assert engines.first is not None
    judge(engines, engines.first)
    assert engines.first.seen["loaded blocks"] > 0


def test_objects_that_vanish_between_lookup_and_load(engines: Pair) -> None:
    """A third of all loads finds its objects gone: misses, computed."""

    outcome = trial(engines, "removed", "objects removed between lookup and load, in 30 % of loads", losing_objects)
    assert outcome.seen["get OBJECT_NOT_FOUND"] > 0


def test_loads_that_bring_fewer_bytes_than_the_object_has(engines: Pair) -> None:
    """The last bytes of an object are garbage and the count says so: the block is computed."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        with pair.misbehaving(FaultSettings(short=0.3)):
            yield

    outcome = trial(engines, "short", "loads answered short, garbage in the rest, in 30 % of loads", fault)
    assert outcome.seen["get SHORT_READ"] > 0


def test_objects_of_another_size_under_the_right_key(engines: Pair) -> None:
    """Half of the stored objects are replaced by longer or shorter ones: none of them is loaded."""

    def resized(data: bytes) -> bytes:
        return data + b"x" if data[0] % 2 else data[:-1]

    outcome = trial(
        engines, "other-size", "objects of another size under the right keys",
        lambda pair, _: store_faults.changed(pair.store, resized),
    )  # fmt: skip
    assert outcome.seen.get("get INVALID_PARAMS", 0) + outcome.seen.get("get TRANSFER_FAIL", 0) > 0


def test_a_reader_meets_blocks_that_are_half_written(engines: Pair) -> None:
    """Every PUT of the TP 2 engine takes a while: readers find some shards of a block and not the others."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        with pair.misbehaving(FaultSettings(put_seconds=0.4), whose=0):
            yield

    trial(engines, "half-written", "one engine's saves take 0.4 s longer: blocks are half written", fault)


def test_prompts_that_are_aborted_while_they_load(engines: Pair) -> None:
    """Clients hang up during loads: blocks of a dead request are not written for a living one."""

    title = "clients hang up while their prompts load, loads take 0.1 s longer"
    trial(engines, "aborted", title, hanging_up)


def test_caches_that_are_reset_under_traffic(engines: Pair) -> None:
    """Every second one engine empties its own cache and the store, sometimes with running requests."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        number = 0

        def reset() -> None:
            nonlocal number
            number += 1
            running = "true" if number % 3 == 0 else "false"
            reset_caches(pair.both[number % 2].server, external="true", running=running)

        with store_faults.repeating(reset, 1.0):
            yield

    trial(engines, "reset", "caches reset every second, in turn on both engines", fault)


def test_a_store_node_that_hangs_and_goes_on(engines: Pair) -> None:
    """One of two nodes is stopped with its connections open; later it goes on."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        pair.store.nodes[0].process.pause()
        try:
            yield
        finally:
            pair.store.nodes[0].process.resume()

    trial(engines, "node-stopped", "one of two store nodes hangs (SIGSTOP), then goes on", fault, seconds=15)


def test_a_store_node_that_dies(engines: Pair) -> None:
    """One of two nodes is killed."""

    trial(engines, "node-killed", "one of two store nodes is killed", killing_a_node, seconds=12)


def test_the_last_store_node_dies_and_another_one_comes(engines: Pair) -> None:
    """No node is left for a while; then a new one joins the same master."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        for number in range(len(pair.store.nodes)):
            pair.drop_node(number)
        yield
        pair.add_node()
        pair.add_node()

    trial(engines, "last-node-killed", "the only store node is killed; new ones join later", fault, seconds=12)


def test_one_engine_loses_the_master(engines: Pair) -> None:
    """Its connections are refused, the other engine goes on with the store."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        with pair.relays[1].refusing():
            yield

    trial(engines, "master-refuses", "the master refuses one of the engines", fault)


def test_one_engine_gets_no_answer_from_the_master(engines: Pair) -> None:
    """Its packets are swallowed, connections stay open: nobody waits for an answer that does not come."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        with pair.relays[1].swallowing():
            yield

    trial(engines, "master-swallows", "the network between the master and one engine drops everything", fault)


def test_the_master_dies_and_starts_again(engines: Pair) -> None:
    """All keys are lost; nodes and engines find the new master by themselves."""

    trial(engines, "master-killed", "the master is killed and started again", killing_the_master, seconds=8)


def test_a_store_that_is_full(engines: Pair) -> None:
    """Somebody else's pinned objects fill every node: saves fail, nothing else does."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        def compute_again() -> None:
            for one in pair.both:
                reset_caches(one.server, external="false", running="true")

        with store_faults.full(pair.store), store_faults.repeating(compute_again, 2.0):
            yield

    outcome = trial(engines, "full", "the store is full of objects that are never evicted", fault)
    assert outcome.seen["put NO_AVAILABLE_HANDLE"] > 0


def test_a_store_that_evicts_all_the_time(engines: Pair) -> None:
    """Somebody else writes faster than the store can keep: blocks leave at any moment."""
    outcome = trial(
        engines, "pressure", "another user of the store writes without pause, everything is evicted",
        lambda pair, _: store_faults.pressed(pair.store),
    )  # fmt: skip
    assert outcome.seen["loaded blocks"] > 0


def test_other_pools_and_models_on_the_same_master(engines: Pair, tmp_path: Path) -> None:
    """Another model under the same pool prefix, by mistake, and the same model in another pool: nobody meets."""
    other_model = tiny_model(TinyModel(seed=21))
    other, prompts = Setup(other_model), PLAIN.texts.traffic("neighbours")
    expected = other.expected(Expected(), tmp_path, 1, [(prompt, 8) for prompt in prompts])
    members = (
        Member("other model", Server(""), expected),
        Member("other pool", Server(""), engines.reader.member.expected),
    )

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for member, setup, namespace in zip(members, (other, PLAIN), (NAMESPACE, "kvs1/p-others/g1"), strict=True):
                started = start_engine(
                    tmp_path, member, 1, pair.store.address, tmp_path / "none", setup, namespace=namespace
                )
                stack.callback(started.stack.close)
            with httpx.Client() as http:
                for member in members:
                    first = member.server.complete(prompts[0], max_tokens=8, client=http)
                    assert (first.cached_tokens, first.token_ids) == (0, member.expected[prompts[0]])
            with Traffic(members, prompts, threads=2) as neighbours:
                yield
            assert len(neighbours.records) > 0
            assert not [r for r in neighbours.records if r.wrong or r.failed]

    trial(engines, "neighbours", "another model under the same prefix and another pool on the same master", fault)


def test_an_engine_that_dies_while_it_saves(engines: Pair) -> None:
    """The TP 2 engine is killed with saves under way and starts again while the other one writes."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        pair.misbehave(FaultSettings(put_seconds=0.2), whose=0)
        time.sleep(2)
        pair.writer.member.may_fail = True
        pair.writer.engine.process.kill()
        pair.misbehave(FaultSettings())
        pair.start_again(0)
        yield

    trial(engines, "writer-killed", "an engine is killed while it saves, and starts again", fault)


def test_requests_that_are_preempted_all_the_time(engines: Pair) -> None:
    """The cache holds two prompts and four are asked at a time: requests lose their blocks, also half loaded."""
    engines.reader.engine.process.kill()
    engines.start_again(1, arguments=("--num-gpu-blocks-override=30", "--max-model-len=512"))

    outcome = trial(
        engines,
        "preempted",
        "a cache so small that requests are preempted all the time",
        lambda *_: contextlib.nullcontext(),
    )
    assert engines.reader.server.metric("vllm:num_preemptions_total") > 0
    assert outcome.seen["loaded blocks"] > 0
