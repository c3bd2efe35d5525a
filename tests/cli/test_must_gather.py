"""`kvshare must-gather` over an API in memory: what the archive has, has not, and lacks without permission."""

from __future__ import annotations

import io
import json
import pathlib
import tarfile
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvshare_operator.api import names
from kvshare_operator.cli import check
from kvshare_operator.cli.main import app
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.memory_api import MemoryClusterApi
from pods import Json, injected, pod_p0, pool_p1

NAMESPACE = "/api/v1/namespaces/ns-a"
PODS = f"{NAMESPACE}/pods"
OPERATOR = "/api/v1/namespaces/kvshare-system"
DEPLOYMENTS = "/apis/apps/v1/namespaces/kvshare-system/deployments"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
SECRET = "Q7x9-Zq.4wVb_81Lm"


class Cluster(MemoryClusterApi):
    """An installation with one pool, one member, a controller, their logs and events."""

    def __init__(self) -> None:
        super().__init__()
        service = {"namespace": "kvshare-system", "name": "kvshare-webhook"}
        hook = {"name": "inject.kvshare.dev", "clientConfig": {"service": service}}
        self.answers[HOOKS] = {
            "items": [{"metadata": {"name": "kvshare"}, "webhooks": [hook]}, {"webhooks": [{"name": "other"}]}]
        }
        pool = pool_p1()
        self.objects[f"/apis/{names.API_VERSION}/namespaces/ns-a/{names.PLURAL}/p1"] = pool
        other = {**pool, "metadata": {**pool["metadata"], "name": "p2"}}
        self.objects[f"/apis/{names.API_VERSION}/namespaces/ns-a/{names.PLURAL}/p2"] = other
        member = injected(pod_p0(env=[{"name": "HF_TOKEN", "value": SECRET}])).pod
        member["status"] = {"phase": "Running", "containerStatuses": [{"name": "vllm", "restartCount": 1}]}
        self.objects[f"{PODS}/p0"] = member
        self.answers[DEPLOYMENTS] = {"items": [{"metadata": {"name": "kvshare-controller"}}]}
        controller = {
            "metadata": {"name": "kvshare-controller-1", "namespace": "kvshare-system"},
            "spec": {"containers": [{"name": "controller"}]},
        }
        self.answers[f"{OPERATOR}/pods"] = {"items": [controller]}
        self.answers[f"{OPERATOR}/pods/kvshare-controller-1/log"] = {
            "text": f"reached http://u:{SECRET}@x.test\nall well\n"
        }
        self.answers[f"{PODS}/p0/log"] = {"text": "prompt: my diary\nINFO kvshare: verdict shared\n"}
        # The log of every container of a pod is the same here; that of the payload's is asked for as well.
        self.answers[f"{NAMESPACE}/events"] = {
            "items": [
                {"involvedObject": {"name": "p1"}, "message": "Ready"},
                {"involvedObject": {"name": "somebody-else"}, "message": "private"},
            ]
        }
        self.queries: list[tuple[str, dict[str, str]]] = []

    async def call(self, method: str, path: str, *, query: Mapping[str, str] | None = None, **more: Any) -> Json:
        """Remember what was asked for."""
        self.queries.append((path, dict(query or {})))
        answer = await super().call(method, path, query=query, **more)
        if path == PODS and "labelSelector" in (query or {}):
            answer["items"] = [pod for pod in answer["items"] if names.MEMBER in pod["metadata"].get("labels", {})]
        return answer


def gather(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, api: MemoryClusterApi, *words: str
) -> tuple[Any, dict[str, str]]:
    """Run the command; return its result and the archive's files without their top folder."""

    async def close() -> None:
        return None

    monkeypatch.setattr(check, "connect", lambda: (api, close, "ns-a"))
    target = tmp_path / "a.tar.gz"
    result = CliRunner().invoke(app, ["must-gather", "-o", str(target), *words])
    if not target.exists():
        return result, {}
    files = {}
    with tarfile.open(fileobj=io.BytesIO(target.read_bytes())) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None
            files[member.name.partition("/")[2]] = content.read().decode()
    return result, files


def test_the_archive_has_what_support_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Pools, members, operator, webhook, logs, events, versions and the check's own words."""
    result, files = gather(monkeypatch, tmp_path, Cluster())
    assert result.exit_code == 0, result.output
    assert {
        "README.txt", "check.txt", "check.json", "cluster-version.json", "versions.json", "missing.txt",
        "webhook/configuration.yaml", "operator/deployments.yaml", "operator/pods.yaml",
        "operator/logs/kvshare-controller-1.controller.log", "pools/ns-a/p1/pool.yaml", "pools/ns-a/p1/members.yaml",
        "pools/ns-a/p1/logs/p0.vllm.log", "pools/ns-a/p1/logs/p0.vllm.previous.log", "pools/ns-a/p1/events.yaml",
        f"pools/ns-a/p1/logs/p0.{names.PAYLOAD_CONTAINER}.log", "pools/ns-a/p2/pool.yaml",
    } <= set(files)  # fmt: skip
    assert [pool["name"] for pool in json.loads(files["check.json"])["pools"]] == ["p1", "p2"]
    assert yaml.safe_load(files["pools/ns-a/p1/pool.yaml"])["spec"] == pool_p1()["spec"]
    assert len(list(yaml.safe_load_all(files["webhook/configuration.yaml"]))) == 1
    assert {"kvshare", "Python", "pools"} <= set(json.loads(files["versions.json"]))


def test_pods_that_were_refused_are_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The commonest reason to ask: a pod without our label, or none at all, as it was denied."""
    api = Cluster()
    left = pod_p0()
    left["metadata"]["name"] = "left"
    left["metadata"]["annotations"][names.INJECTED] = json.dumps({"pool": "p1", "reason": "ShellWrapper"})
    api.objects[f"{PODS}/left"] = left
    denied = 'pods "d-" is forbidden: admission webhook "inject.kvshare.dev" denied the request: kvshare: TPNotInPool'
    api.answers[f"{NAMESPACE}/events"]["items"].append(
        {"involvedObject": {"kind": "ReplicaSet", "name": "decode-1"}, "message": denied}
    )
    _, files = gather(monkeypatch, tmp_path, api)
    assert "ShellWrapper" in files["pools/ns-a/p1/not-injected.yaml"]
    assert "left" not in files["pools/ns-a/p1/members.yaml"]
    assert "pools/ns-a/p2/not-injected.yaml" not in files
    assert "TPNotInPool" in files["pools/ns-a/p1/events.yaml"]


def test_secrets_prompts_and_other_peoples_events_are_not_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Masked in variables and logs; of engines' logs only lines about us; the certificate's Secret is not kept."""
    api = Cluster()
    _, files = gather(monkeypatch, tmp_path, api)
    whole = "".join(files.values())
    assert SECRET not in whole
    assert "***masked***" in files["pools/ns-a/p1/members.yaml"]
    assert "my diary" not in whole
    assert "verdict shared" in files["pools/ns-a/p1/logs/p0.vllm.log"]
    assert "all well" in files["operator/logs/kvshare-controller-1.controller.log"]
    assert "private" not in whole
    read = [path for path, _ in api.queries if "/secrets" in path]
    assert read == ["/api/v1/namespaces/kvshare-system/secrets/kvshare-webhook-certificates"]
    assert "tls.key" not in whole


def test_nothing_is_changed_in_the_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The check's dry runs are the only calls that are no GET."""
    api = Cluster()
    gather(monkeypatch, tmp_path, api)
    assert {path for method, path in api.writes} == {PODS}
    posted = [query for path, query in api.queries if path == PODS and "dryRun" in query]
    assert len(posted) == len(api.writes)


def test_one_pool_only(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """`--pool` leaves others out, and log lines are limited where the logs are."""
    api = Cluster()
    _, files = gather(monkeypatch, tmp_path, api, "--pool", "p1", "--log-lines", "7")
    assert not [name for name in files if name.startswith("pools/ns-a/p2")]
    logs = [query for path, query in api.queries if path.endswith("/log")]
    assert {query["tailLines"] for query in logs} == {"7"}
    assert [query.get("previous") for query in logs if query["container"] == "vllm"] == [None, "true"]


def test_what_may_not_be_read_is_noted_and_the_rest_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A user without rights in the operator's namespace still gets an archive, and is told."""
    api = Cluster()
    for path in (f"{OPERATOR}/pods", DEPLOYMENTS, HOOKS, f"{PODS}/p0/log"):
        api.faults[path] = ApiError(403, "forbidden")
        api.answers.pop(path, None)
    result, files = gather(monkeypatch, tmp_path, api)
    assert result.exit_code == 0
    assert "operator's pods: 403: forbidden" in files["missing.txt"]
    assert "not in it: operator's pods: 403: forbidden" in result.stderr
    assert "log of ns-a/p0, container vllm: 403: forbidden" in files["missing.txt"]
    assert "pools/ns-a/p1/members.yaml" in files


def test_no_cluster_is_code_three_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """There is nothing to send."""
    api = Cluster()
    api.faults["/version"] = ApiError(0, "connection refused")
    result, files = gather(monkeypatch, tmp_path, api)
    assert (result.exit_code, files) == (3, {})
    assert "connection refused" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Nor is a file written into a folder that does not exist; both are wrong usage."""
    (tmp_path / "a.tar.gz").write_text("mine")
    monkeypatch.setattr(check, "connect", lambda: pytest.fail("asked a cluster"))
    for target in (tmp_path / "a.tar.gz", tmp_path / "none" / "b.tar.gz"):
        assert CliRunner().invoke(app, ["must-gather", "-o", str(target)]).exit_code == 2
    assert (tmp_path / "a.tar.gz").read_text() == "mine"


def test_the_archive_is_its_owners(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Nobody else on the machine can read it."""
    gather(monkeypatch, tmp_path, Cluster())
    assert (tmp_path / "a.tar.gz").stat().st_mode & 0o077 == 0


def test_every_file_of_the_connector_that_logs_is_recognised() -> None:
    """vLLM's log has the file's name and no package; lines of others, above all prompts, are not kept."""
    from kvshare_operator.cli.must_gather_reading import _ABOUT_US

    sources = (pathlib.Path(__file__).parents[2] / "connector" / "kvshare_connector").rglob("*.py")
    speaking = {file.name for file in sources if "logging.getLogger" in file.read_text()}
    assert len(speaking) > 5
    assert [name for name in speaking if not _ABOUT_US.search(f"(EngineCore pid=1) INFO 1-1 [{name}:1] said")] == []
    assert not _ABOUT_US.search("(APIServer pid=1) INFO 11-30 [logger.py:39] Received request, prompt: 'my diary'")
    assert not _ABOUT_US.search("(EngineCore pid=1) INFO 11-30 [core_client.py:39] something")
