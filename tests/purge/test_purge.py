"""`kvshare purge` over an API in memory: what is listed, what would be deleted, and everything that prevents it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshare_operator.cli import check, purge_removing
from kvshare_operator.cli.main import app
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.memory_api import MemoryClusterApi
from pods import Json, injected, pod_p0, pool_p1
from stored_keys import block_keys, prefix_at

POOLS = "/apis/kvshare.dev/v1alpha1/kvsharepools"
PROXY = "/api/v1/namespaces/ns-a/pods/master-0:9003/proxy"
OLD, NOW = prefix_at(1), prefix_at(2)
STORED = [*block_keys(OLD, 3), *block_keys(NOW, 2), *block_keys(prefix_at(1, "gone"), 1), "somebody/else"]


def pool_at(generation: int, name: str = "p1", **spec: Any) -> Json:
    """A pool of that generation."""
    pool = pool_p1(model={"name": "org/m", "kvHeads": 8, "generation": generation}, **spec)
    pool["metadata"]["name"] = name
    return pool


class Cluster(MemoryClusterApi):
    """Pool p1 at generation 2, whose master is a pod with STORED in it."""

    def __init__(self, *pods: Json, pools: Sequence[Json] = (pool_at(2),)) -> None:
        super().__init__()
        for pool in pools:
            where = f"/apis/kvshare.dev/v1alpha1/namespaces/{pool['metadata']['namespace']}/kvsharepools"
            self.objects[f"{where}/{pool['metadata']['name']}"] = pool
        service = {"spec": {"selector": {"app": "mooncake"}}}
        self.objects["/api/v1/namespaces/ns-a/services/mooncake-master"] = service
        master = {"metadata": {"name": "master-0", "labels": {"app": "mooncake"}}, "status": {"phase": "Running"}}
        for pod in (master, *pods):
            self.objects[f"/api/v1/namespaces/ns-a/pods/{pod['metadata']['name']}"] = pod
        self.answers[f"{PROXY}/get_all_keys"] = {"text": "\n".join(STORED) + "\n"}
        for key in STORED:
            self.answers[f"{PROXY}/query_key?key={key}"] = {"text": json.dumps({"data": [{"size_": 1024}]})}

    async def call(self, method: str, path: str, *, query: Mapping[str, str] | None = None, **more: Any) -> Json:
        """Answer, and honour selectors of labels, as an API server does."""
        answer = await super().call(method, path, query=query, **more)
        name, _, value = (query or {}).get("labelSelector", "").partition("=")
        if name:
            labels = [(one["metadata"].get("labels") or {}) for one in answer["items"]]
            kept = [n for n, found in enumerate(labels) if name in found and value in ("", found[name])]
            answer["items"] = [answer["items"][n] for n in kept]
        return answer


def member(pool: Json) -> Json:
    """A running pod that was injected for a pool."""
    pod = injected(pod_p0(), pool).pod
    pod["metadata"].update(name="decode-0", uid="u0")
    pod["status"] = {"phase": "Running"}
    return pod


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What Mooncake is told to delete: master and patterns."""
    calls: list[tuple[str, list[str]]] = []

    def remove(master: str, patterns: Sequence[str]) -> list[int]:
        calls.append((master, list(patterns)))
        return [sum(bool(re.search(pattern, key)) for key in STORED) for pattern in patterns]

    monkeypatch.setattr(purge_removing, "remove_here", remove)
    return calls


def run(monkeypatch: pytest.MonkeyPatch, api: MemoryClusterApi, *words: str) -> Any:
    """Run the command against an API."""

    async def close() -> None:
        return None

    monkeypatch.setattr(check, "connect", lambda: (api, close, "ns-a"))
    return CliRunner().invoke(app, ["purge", *words])


def rows(result: Any) -> dict[tuple[str, str], tuple[int, int, str]]:
    """Objects, bytes and state by prefix and first letters of the fingerprint."""
    found = json.loads(result.stdout)["rows"]
    return {
        (one["prefix"], one["fingerprint"][:2]): (one["objects"], one["bytes"], one["state"]) for one in found
    }  # fmt: skip


def test_listing_says_what_is_there_and_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]]
) -> None:
    """Without --delete nothing is written anywhere; sizes come from one object of each kind."""
    api = Cluster()
    listed = run(monkeypatch, api, "-o", "json")
    assert listed.exit_code == 0, listed.output
    assert rows(listed) == {
        (OLD, "f-"): (6, 6144, "old"), (OLD, "ma"): (1, 1024, "old"),
        (NOW, "f-"): (4, 4096, "inUse"), (NOW, "ma"): (1, 1024, "inUse"),
        (prefix_at(1, "gone"), "f-"): (2, 2048, "doubtful"), (prefix_at(1, "gone"), "ma"): (1, 1024, "doubtful"),
    }  # fmt: skip
    assert json.loads(listed.stdout)["otherKeys"] == 1
    table = run(monkeypatch, api)
    assert (table.exit_code, "6.0 KiB" in table.stdout, "ns-a/p1 is at generation 2" in table.stdout) == (0, True, True)
    assert (removed, api.writes) == ([], [])


def test_delete_takes_old_generations_only(
    monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]]
) -> None:
    """Not the pool's own, not a prefix of no pool; the master is the pool's."""
    api = Cluster()
    done = run(monkeypatch, api, "--delete", "--yes", "-o", "json")
    ((master, patterns),) = removed
    assert master == "mooncake-master.ns-a.svc:50051"
    hit = {key for key in STORED for pattern in patterns if re.search(pattern, key)}
    assert hit == set(block_keys(OLD, 3))
    assert json.loads(done.stdout)["removed"] == {OLD: 7}
    # This store did not delete anything, and that is said.
    assert (done.exit_code, "7 objects are left" in done.stderr) == (1, True)


def test_prefix_of_no_pool_goes_when_it_is_named_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]]
) -> None:
    """Who names it says that nobody else uses it."""
    run(monkeypatch, Cluster(), "--delete", "--yes", "--prefix", prefix_at(1, "gone"))
    ((_, patterns),) = removed
    assert {key for key in STORED for one in patterns if re.search(one, key)} == set(
        block_keys(prefix_at(1, "gone"), 1)
    )


@pytest.mark.parametrize("prefix", [NOW, "kvs1/p-none/g1", "kvs1", ""])
def test_prefix_in_use_or_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]], prefix: str
) -> None:
    """No word can make the command delete what a pool refers to."""
    result = run(monkeypatch, Cluster(), "--delete", "--yes", "--prefix", prefix)
    assert (result.exit_code, removed) == (2, [])


def test_pod_of_an_old_generation_keeps_it(
    monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]]
) -> None:
    """It was not restarted when the generation was raised: its flags say where it reads and writes."""
    result = run(monkeypatch, Cluster(member(pool_at(1))), "--delete", "--yes")
    assert (result.exit_code, removed) == (0, [])
    assert "Nothing is old" in result.stderr
    assert "pod ns-a/decode-0 still uses it" in result.stdout


BROKEN = pool_at(1, "broken", prefill={"tensorParallelSizes": [0]})


@pytest.mark.parametrize(
    ("api", "fault"),
    [
        (Cluster(pools=[pool_at(2), BROKEN]), ""), (Cluster(), POOLS), (Cluster(), "/api/v1/pods"),
    ],
    ids=["a pool that cannot be read", "pools of other namespaces", "pods of other namespaces"],
)  # fmt: skip
def test_nothing_is_deleted_while_something_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]], api: MemoryClusterApi, fault: str
) -> None:
    """What may not be seen may refer to anything; the listing still works, and says so."""
    if fault:
        api.faults[fault] = ApiError(403, "forbidden")
    result = run(monkeypatch, api, "--delete", "--yes")
    assert (result.exit_code, removed) == (1, [])
    assert "cannot be read" in result.stderr
    assert OLD in result.stdout


def test_pool_that_changes_while_the_user_thinks_is_seen(
    monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]]
) -> None:
    """Everything is read again before anything goes."""
    api = Cluster()

    def confirm(*_: object, **__: object) -> bool:
        api.objects["/api/v1/namespaces/ns-a/pods/decode-0"] = member(pool_at(1))
        return True

    monkeypatch.setattr("typer.confirm", confirm)
    monkeypatch.setattr("kvshare_operator.cli.purge.asked", lambda: True)
    result = run(monkeypatch, api, "--delete")
    assert (result.exit_code, removed) == (1, [])
    assert "changed meanwhile" in result.stderr


def test_no_stays_no(monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]]) -> None:
    """The question names the number of objects; anything but yes deletes nothing."""
    monkeypatch.setattr("kvshare_operator.cli.purge.asked", lambda: True)
    result = run(monkeypatch, Cluster(), "--delete")
    assert (result.exit_code, removed) == (1, [])
    assert f"Delete 7 objects of {OLD}?" in result.stderr


@pytest.mark.parametrize(
    "words", [["--delete"], ["--yes"], ["--prefix", OLD], ["-n", "a", "-A"], ["--pool", "none"], ["-n", "empty"]]
)
def test_wrong_usage_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch, removed: list[tuple[str, list[str]]], words: list[str]
) -> None:
    """Nobody to ask, a word that says nothing alone, no such pool: exit code 2."""
    result = run(monkeypatch, Cluster(), *words)
    assert (result.exit_code, result.stdout, removed) == (2, "", [])


def test_two_stores_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One store at a time: --pool chooses it."""
    other = pool_at(1, "p2", store={"type": "External", "external": {"masterAddress": "other:50051"}})
    api = Cluster(pools=[pool_at(2), other])
    assert run(monkeypatch, api).exit_code == 2
    assert run(monkeypatch, api, "--pool", "p1").exit_code == 0


def test_without_mooncake_the_command_for_a_pod_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names a pod that has Mooncake, its container, and exactly the patterns."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(monkeypatch, Cluster(member(pool_at(2))), "--delete", "--yes")
    assert result.exit_code == 1
    assert "Mooncake is not installed here" in result.stderr
    assert "kubectl -n ns-a exec decode-0 -c vllm -- python3 -c" in result.stdout
    assert f"'^{OLD}/(" in result.stdout


def test_managed_store_is_deleted_from_its_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes have Mooncake and are let in by the network policies; no engine need run."""
    pool = pool_at(2, store={"type": "Managed", "managed": {"capacityPerNode": "1Gi", "image": "i"}})
    api = Cluster(pools=[pool])
    api.objects["/api/v1/namespaces/ns-a/services/kvs-p1-master"] = {"spec": {"selector": {"app": "mooncake"}}}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(monkeypatch, api, "--delete", "--yes", "-o", "json")
    (command,) = json.loads(result.stdout)["commands"]
    assert "kubectl -n ns-a exec statefulset/kvs-p1-nodes -- python3 -c" in command
    assert "kvs-p1-master.ns-a.svc:50051" in command


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"faults": {f"{PROXY}/get_all_keys": ApiError(503, "no route")}}, "no route"),
        ({"objects": {}}, "kvsharepools"),
    ],
)  # fmt: skip
def test_store_or_cluster_that_does_not_answer_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    """Said with what to do, and nothing on standard output."""
    api = Cluster()
    for name, value in change.items():
        setattr(api, name, value)
    if not api.objects:
        api.faults[POOLS] = ApiError(0, "connection refused")
    result = run(monkeypatch, api)
    assert (result.exit_code, result.stdout, words in result.stderr) == (3, "", True)
