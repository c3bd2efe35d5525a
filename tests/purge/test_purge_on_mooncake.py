"""`kvshare purge` on a real Mooncake: what goes, what stays, and that reading protects."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.settings import StoreSettings
from kvshare_operator.cli import check, purge_removing
from kvshare_operator.cli.main import app
from kvshare_operator.core.store.leftovers import pattern
from kvshare_operator.edges.memory_api import MemoryClusterApi
from pods import pool_p1
from stored_keys import block_keys, prefix_at
from testbed import mooncake

pytestmark = pytest.mark.mooncake
FOREIGN = ["somebody/else", f"{prefix_at(1)}/notes", "kvs1/p-default/g1/manifest"]
OLD, NOW = block_keys(prefix_at(1), 20), block_keys(prefix_at(2), 5)


@pytest.fixture
def running(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[mooncake.Store]:
    """A store in which a lookup protects for minutes, or for as long as a test says (ms)."""
    lease = getattr(request, "param", 600_000)
    with mooncake.store(tmp_path_factory.mktemp("mooncake"), segment="64mb", lease_ms=lease) as store:
        yield store


@pytest.fixture
def client(running: mooncake.Store) -> Iterator[MooncakeStore]:
    """A member's client that has stored an old generation, a present one, and what is not the pool's."""
    opened = MooncakeStore.open(StoreSettings(running.address))
    assert {opened.put_bytes(key, b"x" * 1000) for key in (*OLD, *NOW, *FOREIGN)} == {0}
    yield opened
    opened.close()


def run(monkeypatch: pytest.MonkeyPatch, store: mooncake.Store, *words: str) -> Any:
    """Run the command against pool p1 at generation 2 and the real store."""
    pool = pool_p1(model={"name": "org/m", "generation": 2})
    api = MemoryClusterApi({"/apis/kvshare.dev/v1alpha1/namespaces/ns-a/kvsharepools/p1": pool})

    async def close() -> None:
        return None

    monkeypatch.setattr(check, "connect", lambda: (api, close, "ns-a"))
    where = ["--master-http", f"http://127.0.0.1:{store.master.metrics_port}", "--master", store.address]
    return CliRunner().invoke(app, ["purge", *where, *words])


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("running", [1000], indirect=True)
def test_old_generation_goes_and_everything_else_stays(
    monkeypatch: pytest.MonkeyPatch, running: mooncake.Store
) -> None:
    """Listed with its true size, then deleted; what merely begins like it stays."""
    listed = json.loads(run(monkeypatch, running, "-o", "json").stdout)
    old = [row for row in listed["rows"] if row["state"] == "old"]
    assert sum(row["objects"] for row in old) == len(OLD)
    assert sum(row["bytes"] for row in old) == 1000 * len(OLD)
    assert set(running.master.keys()) == {*OLD, *NOW, *FOREIGN}
    time.sleep(1.5)  # to ask for a size is a read, too
    done = run(monkeypatch, running, "--delete", "--yes", "-o", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["removed"] == {prefix_at(1): len(OLD)}
    assert set(running.master.keys()) == {*NOW, *FOREIGN}
    again = run(monkeypatch, running, "--delete", "--yes")
    assert (again.exit_code, "Nothing is old" in again.stderr) == (0, True)


def test_what_somebody_has_just_looked_up_is_kept_and_said(
    monkeypatch: pytest.MonkeyPatch, running: mooncake.Store, client: MooncakeStore
) -> None:
    """An engine that no pod of the cluster shows still uses the old generation: its lease protects it."""
    assert client.exists_many(OLD[:3]) == [1, 1, 1]
    done = run(monkeypatch, running, "--delete", "--yes")
    assert (done.exit_code, "3 objects are left" in done.stderr) == (1, True), done.output
    assert set(running.master.keys()) == {*OLD[:3], *NOW, *FOREIGN}


def test_printed_command_deletes_from_inside_a_pod(running: mooncake.Store, client: MooncakeStore) -> None:
    """What stands behind `--` is run as it is, by a shell, with Mooncake and nothing of ours."""
    place = purge_removing.Place("ns-a", "decode-0", "vllm")
    text = purge_removing.command(place, running.address, [pattern(prefix_at(1))])
    inside = text.partition(" -- python3 ")[2]
    ran = subprocess.run(f"{sys.executable} {inside}", shell=True, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1] == f"REMOVED [{len(OLD)}]", ran.stderr
    assert client.exists_many(NOW) == [1] * len(NOW)
    assert set(running.master.keys()) == {*NOW, *FOREIGN}


def test_master_that_does_not_answer_clients_is_said(monkeypatch: pytest.MonkeyPatch, running: mooncake.Store) -> None:
    """Nothing is deleted, exit code 1, and the words name the address."""
    client = MooncakeStore.open(StoreSettings(running.address))
    assert client.put_bytes(OLD[0], b"x") == 0
    client.close()
    done = run(monkeypatch, running, "--master", "127.0.0.1:9", "--delete", "--yes")
    assert (done.exit_code, "127.0.0.1:9" in done.stderr) == (1, True), done.output
    assert running.master.keys() == [OLD[0]]
