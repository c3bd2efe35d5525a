"""A pool that is edited under traffic, and weights that are not the pool's, on real engines of the one-node cluster.

The tests are one story: each goes on where the one before stopped.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from testbed import places
from testbed.cluster import cluster
from testbed.completions import Answer
from testbed.demo import engines
from testbed.demo.engines import DemoEngine
from testbed.demo.place import OwnCluster
from testbed.demo.settings import Settings
from testbed.demo.steps import NAMESPACE, PROMPT_TOKENS, Demo, condition, text_tokens, whole_blocks
from testbed.kubectl import KubectlError
from testbed.tiny_llama import TinyModel
from testbed.tiny_model import tiny_model

pytestmark = pytest.mark.scenario
SETTINGS = Settings(prefill_sizes=(2,), decode_sizes=(1,))
TWO = DemoEngine("prefill", 2, "NHD", "prefill")
ONE = DemoEngine("decode", 1, "HND", "decode")
OTHER = DemoEngine("other", 1, "HND", "both")
CACHED = whole_blocks(PROMPT_TOKENS - 1)
OTHER_WEIGHTS = TinyModel(seed=21)


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """A TP 2 and a TP 1 engine share a pool."""
    with cluster(places.CACHE / "cluster" / "edit-tests", images=OwnCluster.archives()) as running:
        made = Demo(OwnCluster(running), SETTINGS, lambda text: print(text, flush=True))
        made.install_product()
        made.start_store()
        made.apply_pool()
        made.kubectl.apply(*(engines.deployment(engine, made.place, SETTINGS) for engine in (TWO, ONE)))
        for engine in (TWO, ONE):
            made.kubectl.wait_for_deployment(engine.name, seconds=600)
        yield made


def ask(demo: Demo, engine: DemoEngine, salt: int, **extra: Any) -> Answer:
    """Ask an engine for the prompt of that salt, and wait until its blocks are in the store."""
    answer = engines.server(engine, demo.place, NAMESPACE).complete(text_tokens(PROMPT_TOKENS, salt=salt), extra=extra)
    demo.wait_for_writes()
    return answer


@contextlib.contextmanager
def traffic(demo: Demo) -> Iterator[list[str]]:
    """Short requests to both engines all the time; collects what failed."""
    failed: list[str] = []
    stop = threading.Event()

    def load(engine: DemoEngine, salt: int) -> None:
        while not stop.is_set():
            try:
                server = engines.server(engine, demo.place, NAMESPACE)
                server.complete(text_tokens(100, salt=salt), max_tokens=4)
            except Exception as error:
                failed.append(f"{engine.name}: {error}")
            stop.wait(0.3)

    threads = [threading.Thread(target=load, args=(engine, 1000 + n)) for n, engine in enumerate((TWO, ONE))]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def edit(demo: Demo, **spec: Any) -> None:
    """Edit the pool, and wait until the status is about the edit."""
    demo.kubectl.run("patch", "kvsharepool", "demo", "--type=merge", f"--patch={json.dumps({'spec': spec})}")
    generation = demo.pool()["metadata"]["generation"]
    demo.kubectl.wait_for(
        "the edit is seen", lambda: demo.pool()["status"]["observedGeneration"] == generation, seconds=60
    )


def restart(demo: Demo, engine: DemoEngine) -> None:
    """Restart an engine as its problem's command says, and wait until the pool has its report."""
    demo.kubectl.run("rollout", "restart", f"deployment/{engine.name}")
    demo.kubectl.run("rollout", "status", f"deployment/{engine.name}", "--timeout=590s", timeout=600)
    demo.kubectl.wait_for(
        "its report is there", lambda: f"deployment/{engine.name}" not in problems(demo), seconds=60,
        about=lambda: demo.kubectl.describe("kvsharepool", "demo"),
    )  # fmt: skip


def problems(demo: Demo) -> dict[str, str]:
    """Reason by owner."""
    return {one["owner"]: one["reason"] for one in demo.pool()["status"].get("problems", [])}


def test_edit_that_keeps_the_cache_outdates_running_engines_and_they_go_on_sharing(demo: Demo) -> None:
    """F9: another staging size under traffic: both `Outdated`, still hits across, and no failed request."""
    with traffic(demo) as failed:
        edit(demo, connector={"stagingMemoryPerRank": "128Mi"})
        assert problems(demo) == {"deployment/prefill": "Outdated", "deployment/decode": "Outdated"}
        assert condition(demo.pool(), "MembersConsistent") == "True"
        first = ask(demo, TWO, salt=1)
        assert ask(demo, ONE, salt=1).cached_tokens == CACHED
    assert first.cached_tokens == 0
    assert failed == []


def test_added_size_that_moves_the_store_tp_size_is_joined_pod_by_pod(demo: Demo) -> None:
    """TP 4 beside 2 and 1: refused, then wished for; old pods share among themselves, restarted ones anew."""
    with pytest.raises(KubectlError, match="would move Store TP"):
        edit(demo, prefill={"tensorParallelSizes": [2, 4]})
    with traffic(demo) as failed:
        edit(demo, prefill={"tensorParallelSizes": [2, 4]}, storeTPSize=4)
        assert demo.pool()["status"]["storeTPSize"] == 4
        assert problems(demo) == {"deployment/prefill": "CacheSplit", "deployment/decode": "CacheSplit"}
        first = ask(demo, TWO, salt=2)
        assert ask(demo, ONE, salt=2).cached_tokens == CACHED
    assert failed == []
    restart(demo, ONE)
    assert set(problems(demo)) == {"deployment/prefill"}
    again = ask(demo, ONE, salt=2)
    assert (again.cached_tokens, again.token_ids) == (0, first.token_ids)
    restart(demo, TWO)
    assert (ask(demo, TWO, salt=2).cached_tokens, problems(demo)) == (CACHED, {})


def test_edit_that_starts_a_new_cache_splits_running_engines_from_new_ones(demo: Demo) -> None:
    """F9: a higher model generation under traffic: named with the command; a new pod hits nothing of the old cache."""
    before = engines.server(ONE, demo.place, NAMESPACE).complete(text_tokens(PROMPT_TOKENS, salt=1))
    with traffic(demo) as failed:
        edit(demo, model={"generation": 2})
        assert problems(demo) == {"deployment/prefill": "CacheSplit", "deployment/decode": "CacheSplit"}
        messages = [one["message"] for one in demo.pool()["status"]["problems"]]
        assert any(f"kubectl -n {NAMESPACE} rollout restart deployment/decode" in text for text in messages)
    assert failed == []
    demo.kubectl.run("rollout", "restart", f"deployment/{ONE.name}")
    other = engines.deployment(OTHER, demo.place, SETTINGS)
    for volume in other["spec"]["template"]["spec"]["volumes"]:
        if volume.get("hostPath", {}).get("path") == str(tiny_model().resolve()):
            volume["hostPath"]["path"] = str(tiny_model(OTHER_WEIGHTS).resolve())
    demo.kubectl.apply(other)
    for engine in (ONE, OTHER):
        demo.kubectl.wait_for_deployment(engine.name, seconds=600)
    again = ask(demo, ONE, salt=1)
    assert (again.cached_tokens, again.token_ids) == (0, before.token_ids)
    assert problems(demo)["deployment/prefill"] == "CacheSplit"
    assert problems(demo).get("deployment/decode") != "CacheSplit"  # of two with other weights, one differs


def test_other_weights_at_the_same_path_hit_nothing_and_answer_as_they_would_alone(demo: Demo) -> None:
    """F8: same pool, path, shapes and names; the salted request can use no cache at all and is the reference."""
    answer = ask(demo, OTHER, salt=1)
    assert answer.cached_tokens == 0
    assert answer.token_ids == ask(demo, OTHER, salt=1, cache_salt="alone").token_ids
    demo.kubectl.wait_for(
        "the split is named", lambda: "FingerprintSplit" in problems(demo).values(), seconds=60,
        about=lambda: demo.kubectl.describe("kvsharepool", "demo"),
    )  # fmt: skip
    (members,) = [one for one in demo.pool()["status"]["conditions"] if one["type"] == "MembersConsistent"]
    assert "weights" in members["message"]
