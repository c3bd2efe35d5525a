"""One thing at a time goes wrong under steady traffic: no wrong token, no failed request, and sharing comes back."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from testbed import reliability, store_faults
from testbed.completions import Server
from testbed.fault_trials import (
    NAMESPACE,
    READER,
    Outcome,
    Pair,
    answers_for,
    judge,
    pair,
    run_trial,
    start_engine,
)
from testbed.faulty_connector import FaultSettings
from testbed.tiny_llama import TinyModel
from testbed.tiny_model import tiny_model
from testbed.traffic import Member, Traffic, traffic_prompts

pytestmark = pytest.mark.faults

#: Length of the answers by trial; the order is that of the table.
TRIALS = dict.fromkeys(
    (
        "calm", "removed", "short", "other-size", "half-written", "aborted", "reset", "node-stopped", "node-killed",
        "last-node-killed", "master-refuses", "master-swallows", "master-killed", "full", "pressure", "neighbours",
        "writer-killed",
    ),
    8,
) | {"preempted": 40}  # fmt: skip

Fault = Callable[[Pair, Traffic], contextlib.AbstractContextManager[None]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both engines, and the latencies of a run without any fault."""
    with pair(tmp_path_factory.mktemp("faults"), TRIALS) as made:
        calm = run_trial(made, "calm", "nothing", lambda *_: contextlib.nullcontext(), seconds=8)
        reliability.keep(calm, list(TRIALS))
        made.first = calm
        yield made


def trial(engines: Pair, name: str, title: str, fault: Fault, *, seconds: float = 7) -> Outcome:
    """Run a trial, keep its row whatever it shows, and judge it."""
    outcome = run_trial(engines, name, title, fault, seconds=seconds)
    reliability.keep(outcome, list(TRIALS))
    judge(engines, outcome)
    return outcome


def test_sharing_works_while_nothing_goes_wrong(engines: Pair) -> None:
    """The yardstick: both engines load what the other has saved, without one failed key."""
    assert engines.first is not None
    judge(engines, engines.first)
    assert engines.first.seen["loaded blocks"] > 0


def test_objects_that_vanish_between_lookup_and_load(engines: Pair) -> None:
    """A third of all loads finds its objects gone: misses, computed."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        with pair.misbehaving(FaultSettings(removed=0.3)):
            yield

    outcome = trial(engines, "removed", "objects removed between lookup and load, in 30 % of loads", fault)
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

    @contextlib.contextmanager
    def fault(pair: Pair, traffic: Traffic) -> Iterator[None]:
        prompts = traffic_prompts("aborted")
        number = 0

        def hang_up() -> None:
            nonlocal number
            number += 1
            server = pair.both[number % 2].server
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(
                    f"{server.url}/v1/completions",
                    json={"prompt": list(prompts[number % len(prompts)]), "max_tokens": 64, "ignore_eos": True},
                    timeout=0.02 + number % 5 * 0.03,
                )

        with pair.misbehaving(FaultSettings(get_seconds=0.1)), store_faults.repeating(hang_up, 0.05):
            yield

    trial(engines, "aborted", "clients hang up while their prompts load, loads take 0.1 s longer", fault)


def test_caches_that_are_reset_under_traffic(engines: Pair) -> None:
    """Every second one engine empties its own cache and the store, sometimes with running requests."""

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        number = 0

        def reset() -> None:
            nonlocal number
            number += 1
            running = "true" if number % 3 == 0 else "false"
            httpx.post(
                f"{pair.both[number % 2].server.url}/reset_prefix_cache",
                params={"reset_external": "true", "reset_running_requests": running},
                timeout=30,
            ).raise_for_status()

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

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        pair.drop_node(0)
        yield

    trial(engines, "node-killed", "one of two store nodes is killed", fault, seconds=12)


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

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        pair.store.master.process.kill()
        yield
        pair.restart_master()

    trial(engines, "master-killed", "the master is killed and started again", fault, seconds=8)


def test_a_store_that_is_full(engines: Pair) -> None:
    """Somebody else's pinned objects fill every node: saves fail, nothing else does."""
    outcome = trial(
        engines, "full", "the store is full of objects that are never evicted",
        lambda pair, _: store_faults.full(pair.store),
    )  # fmt: skip
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
    prompts = traffic_prompts("neighbours")
    expected = answers_for(tmp_path, "neighbours", 8, other_model)
    members = (
        Member("other model", Server(""), expected),
        Member("other pool", Server(""), engines.reader.member.expected),
    )
    tp, layout = READER

    @contextlib.contextmanager
    def fault(pair: Pair, _: Traffic) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for member, model, namespace in zip(
                members, (other_model, None), (NAMESPACE, "kvs1/p-others/g1"), strict=True
            ):
                started = start_engine(
                    tmp_path,
                    member,
                    tp,
                    layout,
                    pair.store.address,
                    tmp_path / "none",
                    namespace=namespace,
                    model=model,
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
    """The cache holds three prompts and four are asked at a time: requests lose their blocks, also half loaded."""
    engines.reader.engine.process.kill()
    engines.start_again(1, arguments=("--num-gpu-blocks-override=46",))

    outcome = trial(
        engines,
        "preempted",
        "a cache so small that requests are preempted all the time",
        lambda *_: contextlib.nullcontext(),
    )
    assert engines.reader.server.metric("vllm:num_preemptions_total") > 0
    assert outcome.seen["loaded blocks"] > 0
