"""A real engine with a real store that hangs, half hangs, or is emptied under traffic.

One engine plays all parts: it stores prompts, forgets its own cache, and reads them back. Its first answers, computed
when nothing was stored, are what every later answer must equal.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from testbed import mooncake
from testbed.completions import Answer, Server
from testbed.engine import engine
from testbed.sharing import BLOCK, ENVIRONMENT, connector_flags, counted, empty_cache, objects, settle, text

pytestmark = pytest.mark.matrix

LEASE_SECONDS = 10
"""Mooncake's default."""
HANG_SECONDS = 30
STORE_WAIT_SECONDS = 3
"""Less than one call that waits for a store that hangs (Mooncake gives up after 4 s), more than all steps cost."""
ANSWER_TOKENS = 8
STORED = [text(seed, 401 + 10 * seed) for seed in range(1, 9)]
BLOCKS = sum(len(prompt) // BLOCK for prompt in STORED)


@dataclass
class Running:
    """The parts, and the first answers to the stored prompts."""

    store: mooncake.Store
    server: Server
    expected: list[Answer]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two store nodes and one engine that has stored eight prompts."""
    folder = tmp_path_factory.mktemp("faults")
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(folder, nodes=2))
        server = stack.enter_context(
            engine(
                folder, "engine", layout="NHD", reference_attention=True,
                arguments=connector_flags(store, store_tp=1, save_decode_cache=False),
                environment={**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"},
            )
        ).server  # fmt: skip
        expected = [server.complete(prompt, max_tokens=ANSWER_TOKENS) for prompt in STORED]
        settle(store, BLOCKS)
        yield Running(store, server, expected)


def ask_all(server: Server, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """All prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: server.complete(prompt, max_tokens=ANSWER_TOKENS), prompts))


def test_what_was_stored_comes_back_after_the_engine_has_forgotten_it(running: Running) -> None:
    """C19: the second pass of the same prompts reads; without this, the tests below would prove nothing."""
    empty_cache(running.server)
    answers = ask_all(running.server, STORED)
    assert [a.token_ids for a in answers] == [e.token_ids for e in running.expected]
    assert sum(a.cached_tokens for a in answers) == BLOCKS * BLOCK


def test_one_hanging_node_of_two_costs_less_than_a_lease(running: Running) -> None:
    """F7: eight loads with half of their keys on a node that hangs; all end, healthy keys arrive, answers are right."""
    empty_cache(running.server)
    before = running.server.metric("kvshare_loaded_objects_total")
    running.store.nodes[1].process.pause()
    try:
        started = time.monotonic()
        answers = ask_all(running.server, STORED)
        took = time.monotonic() - started
    finally:
        running.store.nodes[1].process.resume()
    assert took < LEASE_SECONDS
    assert [a.token_ids for a in answers] == [e.token_ids for e in running.expected]
    assert counted(running.server, "kvshare_loaded_objects_total", before + 1) > before


def test_a_store_that_hangs_does_not_hold_the_engine(running: Running) -> None:
    """E2 and F6: the whole store stands still; steps go on, and the scheduler's thread spends no time waiting."""
    processes = [running.store.master.process, *(node.process for node in running.store.nodes)]
    blocked = running.server.metric("kvshare_scheduler_seconds_total")
    slowest, seed = 0.0, 20
    for process in processes:
        process.pause()
    try:
        end = time.monotonic() + HANG_SECONDS
        while time.monotonic() < end:
            started, seed = time.monotonic(), seed + 1
            prompts = [text(seed, 20), *(text(seed * 8 + i, 150) for i in range(3))]
            ask_all(running.server, prompts)
            slowest = max(slowest, time.monotonic() - started)
    finally:
        for process in reversed(processes):
            process.resume()
    assert running.server.healthy()
    assert slowest < LEASE_SECONDS
    assert running.server.metric("kvshare_scheduler_seconds_total") - blocked < STORE_WAIT_SECONDS


def test_the_engine_shares_again_once_the_store_is_back(running: Running) -> None:
    """Nothing has to be restarted: what is stored afterwards is read afterwards."""
    deadline = time.monotonic() + 90
    for seed in range(40, 1000):
        prompt = text(seed, 200)
        first = running.server.complete(prompt, max_tokens=ANSWER_TOKENS)
        time.sleep(1)
        empty_cache(running.server)
        second = running.server.complete(prompt, max_tokens=ANSWER_TOKENS)
        assert second.token_ids == first.token_ids
        if second.cached_tokens == len(prompt) // BLOCK * BLOCK:
            return
        assert time.monotonic() < deadline, "no block came back for 90 s"


def test_a_reset_under_traffic_leaves_no_key_of_before(running: Running) -> None:
    """F4: resets while requests run and save; no error, and afterwards nothing that was stored before is read."""
    with ThreadPoolExecutor(1) as thread:
        traffic = thread.submit(lambda: [ask_all(running.server, STORED) for _ in range(3)])
        while not traffic.done():
            running.server.reset_cache(external=True)
            time.sleep(0.3)
        rounds = traffic.result()
    for answers in rounds:
        assert [a.token_ids for a in answers] == [e.token_ids for e in running.expected]
    empty_cache(running.server, external=True)
    deadline = time.monotonic() + 30
    while objects(running.store):
        assert time.monotonic() < deadline, f"{len(objects(running.store))} keys are left"
        time.sleep(0.2)
    time.sleep(2)
    assert objects(running.store) == []
    answers = ask_all(running.server, STORED[:2])
    assert [a.cached_tokens for a in answers] == [0, 0]
    assert [a.token_ids for a in answers] == [e.token_ids for e in running.expected[:2]]
