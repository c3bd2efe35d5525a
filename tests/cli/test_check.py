"""`kvshare check` over an API in memory: what is good, what is not, the documented JSON, exit codes, waiting."""

from __future__ import annotations

import base64
import copy
import datetime
import json
from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshare_layout import reports
from kvshare_operator.api import names
from kvshare_operator.cli import check
from kvshare_operator.cli.check_reading import probe_pod
from kvshare_operator.cli.main import app
from kvshare_operator.core import certificates
from kvshare_operator.core.injection.inject import inject
from kvshare_operator.core.pool.conditions import pod_conditions
from kvshare_operator.core.pool.status import Gathered, Reach, next_status
from kvshare_operator.core.pool.view import view
from kvshare_operator.core.review import answer
from kvshare_operator.edges.apply import as_json
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.memory_api import MemoryClusterApi
from pods import SETTINGS, Json, injected, pod_p0, pool_p1, refused

NOW = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
PODS = "/api/v1/namespaces/ns-a/pods"
POOL = "/apis/kvshare.dev/v1alpha1/namespaces/ns-a/kvsharepools/p1"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
SECRET = "/api/v1/namespaces/kvshare-system/secrets/kvshare-webhook-certificates"
OWNER = {"kind": "ReplicaSet", "name": "decode-abc", "controller": True}


class Cluster(MemoryClusterApi):
    """An API server in memory whose webhook answers creations, or does not."""

    def __init__(self, *pods: Json, pool: Json | None = None, webhook: bool = True) -> None:
        super().__init__()
        self.pool = ready(pool or pool_p1())
        self.objects[POOL] = self.pool
        self.webhook = webhook
        self.accepted: list[Json] = []
        for number, pod in enumerate(pods):
            pod["metadata"].update(name=f"p{number}", uid=f"u{number}")
            self.objects[f"{PODS}/p{number}"] = pod
        service = {"namespace": "kvshare-system", "name": "kvshare-webhook"}
        hook = {"name": "inject.kvshare.dev", "clientConfig": {"service": service}}
        self.answers[HOOKS] = {"items": [{"webhooks": [hook]}]}
        material = certificates.renewed(None, ["x"], NOW)
        assert material is not None
        encoded = base64.b64encode(material[0].certificate.encode()).decode()
        self.answers[SECRET] = {"data": {"tls.crt": encoded}}

    async def call(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None, **more: Any
    ) -> Json:
        """Answer creations like an API server with our webhook; nothing is stored in a dry run."""
        if method != "POST" or path in self.faults:
            return await super().call(method, path, query=query, body=body, **more)
        assert query == {"dryRun": "All"}
        assert body is not None
        self.calls.append((method, path))
        request = {"operation": "CREATE", "namespace": "ns-a", "kind": {"kind": "Pod"}, "object": body}
        response = answer(request, self.pool, SETTINGS).response if self.webhook else {}
        pod = copy.deepcopy(body)
        if "patch" in response:
            for operation in json.loads(base64.b64decode(response["patch"])):
                if operation["path"].startswith("/metadata/annotations/"):
                    key = operation["path"].rsplit("/", 1)[1].replace("~1", "/")
                    pod["metadata"]["annotations"][key] = operation["value"]
        return pod

    async def close(self) -> None:
        """Nothing is open."""


def ready(pool: Json) -> Json:
    """The pool after a pass of the controller."""
    status = next_status(Gathered(pool, (), Reach(True), SETTINGS.connector_image, NOW))
    return {**pool, "status": as_json(status)}


def member(pod: Json | None = None, **report: Any) -> Json:
    """A running, injected pod of deployment `decode`; keyword arguments make its report."""
    done = injected(pod or pod_p0())
    made = done.pod
    made["metadata"].update(ownerReferences=[OWNER], labels={**made["metadata"]["labels"], "pod-template-hash": "abc"})
    made["status"] = {"phase": "Running"}
    if report:
        facts: Json = {
            "pool_prefix": done.record.cache_namespace, "verdict": "shared", "reason": "Shared", "message": "",
            "fingerprint": "f" * 64, "namespace": "n", "store_tp": 4, "tp": 2, "pp": 1, "rank_layouts": ("LBNHC",),
            "kv_heads": 8, "block_tokens": 16, "manifest": {"a": "1"}, "engine": "0.32.0", **report,
        }  # fmt: skip
        made["status"]["conditions"] = pod_conditions(reports.MemberReport(**facts), NOW)
    return made


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed time, and no pauses."""
    monkeypatch.setattr(check, "now", lambda: NOW)
    monkeypatch.setattr(check, "_PAUSE_SECONDS", 0.0)


def run(monkeypatch: pytest.MonkeyPatch, api: MemoryClusterApi, *words: str) -> Any:
    """Run the command against an API."""

    async def close() -> None:
        return None

    monkeypatch.setattr(check, "connect", lambda: (api, close, "ns-a"))
    return CliRunner().invoke(app, ["check", *words])


def found(monkeypatch: pytest.MonkeyPatch, api: MemoryClusterApi, code: int, *words: str) -> Json:
    """Run with JSON output and expect an exit code."""
    result = run(monkeypatch, api, "-o", "json", *words)
    assert result.exit_code == code, result.output
    out: Json = json.loads(result.stdout)
    assert set(out) == {"webhook", "pools"}
    assert set(out["webhook"]) == {"dryRunInjected", "certExpires"}
    for pool in out["pools"]:
        assert set(pool) == {"name", "members", "fingerprints", "owners"}
        assert all(set(one) == {"name", "pods", "state", "reason", "restartCommand"} for one in pool["owners"])
    return out


def test_everything_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members share; the webhook injects; the certificate is young; nothing was written."""
    api = Cluster(member(verdict="shared"), member(verdict="shared"))
    out = found(monkeypatch, api, 0)
    assert out["webhook"] == {"dryRunInjected": True, "certExpires": "2027-01-30T00:00:00Z"}
    (pool,) = out["pools"]
    assert (pool["name"], pool["members"]["shared"], pool["members"]["total"]) == ("p1", 2, 2)
    assert pool["owners"] == [
        {"name": "deployment/decode", "pods": 2, "state": "shared", "reason": "Shared", "restartCommand": None}
    ]
    (group,) = pool["fingerprints"]
    assert ("f" * 64).startswith(group["id"])
    assert (group["members"], group["layouts"], group["tensorParallelSizes"]) == (2, ["LBNHC"], [2])
    assert {path for method, path in api.writes} == {PODS}
    assert found(monkeypatch, api, 0, "-A")["pools"][0]["name"] == "ns-a/p1"


def owner(monkeypatch: pytest.MonkeyPatch, api: MemoryClusterApi, code: int = 1) -> tuple[str, str, str | None]:
    """The only owner's state, reason and command."""
    (row,) = found(monkeypatch, api, code)["pools"][0]["owners"]
    return row["state"], row["reason"], row["restartCommand"]


RESTART = "kubectl -n ns-a rollout restart deployment/decode"


def test_members_that_do_not_share_are_named_with_reason_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolated and disabled, as they reported."""
    for verdict, reason in (("isolated", "HashMismatch"), ("disabled", "MooncakeMissing")):
        api = Cluster(member(verdict=verdict, reason=reason, message="why"))
        assert owner(monkeypatch, api) == (verdict, reason, RESTART)


def test_pods_that_were_not_injected_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with a reason, or missed by the webhook."""
    left = pod_p0()
    left["metadata"]["ownerReferences"] = [{"kind": "StatefulSet", "name": "s", "controller": True}]
    command = "kubectl -n ns-a rollout restart statefulset/s"
    assert owner(monkeypatch, Cluster(copy.deepcopy(left))) == ("notInjected", "NotInjected", command)
    wrong = copy.deepcopy(left)
    wrong["spec"]["containers"][0]["args"] = ["--tensor-parallel-size", "3"]
    reason = refused(wrong)
    wrong["metadata"]["annotations"][names.INJECTED] = json.dumps({"pool": "p1", "reason": reason.code})
    assert owner(monkeypatch, Cluster(wrong)) == ("notInjected", "TPNotInPool", command)


def test_other_namespace_is_a_split_and_other_revision_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new generation empties the cache; a new address of the store does not."""
    moved = pool_p1(model={"name": "org/m", "kvHeads": 8, "generation": 2})
    assert owner(monkeypatch, Cluster(member(verdict="shared"), pool=moved))[:2] == ("cacheSplit", "CacheSplit")
    changed = pool_p1(store={"type": "External", "external": {"masterAddress": "other.ns-a.svc:50051"}})
    api = Cluster(member(verdict="shared"), pool=changed)
    assert owner(monkeypatch, api, 0) == ("outdated", "Outdated", RESTART)


def test_fingerprints_that_differ_are_shown_with_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller group is the problem."""
    odd = member(verdict="shared", fingerprint="e" * 64, manifest={"a": "2"})
    api = Cluster(member(verdict="shared"), member(verdict="shared"), odd)
    (pool,) = found(monkeypatch, api, 1)["pools"]
    assert [one["members"] for one in pool["fingerprints"]] == [2, 1]
    assert pool["fingerprints"][1]["differingFields"] == ["a"]
    assert {row["state"]: row["pods"] for row in pool["owners"]} == {"shared": 2, "fingerprintSplit": 1}
    assert "differs in" in run(monkeypatch, api).stdout


def test_a_webhook_that_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that refuses the probe says why."""
    api = Cluster(webhook=False)
    assert found(monkeypatch, api, 1)["webhook"]["dryRunInjected"] is False
    assert "was not touched" in run(monkeypatch, api).stderr
    broken = Cluster(pool=pool_p1(storeTPSize=3))
    assert found(monkeypatch, broken, 1)["webhook"]["dryRunInjected"] is False
    assert "PoolNotReady" in run(monkeypatch, broken).stderr


@pytest.mark.parametrize(("days", "code"), [(0, 0), (82, 0), (84, 1), (100, 1)])
def test_a_certificate_that_ends_soon_is_a_problem(monkeypatch: pytest.MonkeyPatch, days: int, code: int) -> None:
    """It lives 90 days and should have been renewed 30 days before its end."""
    monkeypatch.setattr(check, "now", lambda: NOW + datetime.timedelta(days=days))
    result = run(monkeypatch, Cluster())
    assert result.exit_code == code
    assert ("was not renewed" in result.stderr) == bool(code)


def test_a_certificate_is_found_in_the_secret_that_the_configuration_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Secret of the user's own has a name of its own."""
    api = Cluster(member(verdict="shared"))
    api.answers[HOOKS]["items"][0]["metadata"] = {"annotations": {names.CERTIFICATE_SECRET: "mine"}}
    api.answers["/api/v1/namespaces/kvshare-system/secrets/mine"] = api.answers.pop(SECRET)
    assert found(monkeypatch, api, 0)["webhook"]["certExpires"] is not None


def test_a_status_that_is_older_than_the_spec_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller does not work, or has not come round yet."""
    api = Cluster()
    api.objects[POOL]["metadata"]["generation"] = 2
    result = run(monkeypatch, api)
    assert result.exit_code == 1
    assert "has not looked at the present spec yet" in result.stdout


def test_what_may_not_be_read_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users of one namespace see neither Secrets nor webhook configurations, and may not create pods."""
    api = Cluster(member(verdict="shared"))
    for path in (HOOKS, SECRET):
        api.faults[path] = ApiError(403, "forbidden")
    out = found(monkeypatch, api, 0)
    assert out["webhook"]["certExpires"] is None
    assert "forbidden" in run(monkeypatch, api).stderr


def test_no_cluster_is_3_and_no_resource_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also missing permission for pools: nothing can be said then."""
    path = "/apis/kvshare.dev/v1alpha1/namespaces/ns-a/kvsharepools"
    for status, code in ((0, 3), (401, 3), (403, 3), (404, 1)):
        api = Cluster()
        api.faults[path] = ApiError(status, "no")
        result = run(monkeypatch, api)
        assert result.exit_code == code, result.output
        assert result.stderr


def test_named_pool_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo is no good news."""
    result = run(monkeypatch, Cluster(), "--pool", "p2")
    assert result.exit_code == 1
    assert "PoolNotFound" in result.stderr
    assert run(monkeypatch, Cluster(), "--pool", "p1").exit_code == 0


def test_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2."""
    for words in (("-A", "-n", "x"), ("--wait", "5"), ("--wait", "soon"), ("-o", "yaml")):
        assert run(monkeypatch, Cluster(), *words).exit_code == 2


def test_waiting_ends_when_members_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not reported is good without --wait, and what --wait waits for."""
    api = Cluster(member())
    assert found(monkeypatch, api, 0)["pools"][0]["owners"][0]["state"] == "unreported"
    looks = 0

    async def call(method: str, path: str, **more: Any) -> Json:
        nonlocal looks
        looks += path == PODS and method == "GET"
        if looks == 5:
            pod = member(verdict="shared")
            pod["metadata"].update(name="p0", uid="u0")
            api.objects[f"{PODS}/p0"] = pod
        return await Cluster.call(api, method, path, **more)

    monkeypatch.setattr(api, "call", call)
    out = found(monkeypatch, api, 0, "--wait", "1m")
    assert out["pools"][0]["owners"][0]["state"] == "shared"
    assert looks >= 5


def test_waiting_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 when a member has not reported in time."""
    assert run(monkeypatch, Cluster(member()), "--wait", "0s").exit_code == 1


def test_the_probe_fits_its_pool_and_asks_for_nothing_special() -> None:
    """Whatever the pool compares, the probe has it; it would pass the restricted standard."""
    pool = pool_p1(
        model={"name": "org/m", "revision": "abc"}, cache={"dtype": "fp8"}, pipelineParallelSizes=[2], decode=None
    )
    seen = view(pool, SETTINGS.connector_image)
    pod = probe_pod("ns-a", "p1", seen.spec)
    assert not hasattr(inject(pod, seen, SETTINGS), "code")
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


def test_the_page_has_store_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator said about the store, and what runs: command, operator, cluster, payload, engines."""
    api = Cluster(member(verdict="shared"), member(verdict="shared"))
    api.answers["/version"] = {"gitVersion": "v1.36.1"}
    api.answers[HOOKS]["items"][0]["metadata"] = {"labels": {"app.kubernetes.io/version": "0.1.0"}}
    page = run(monkeypatch, api).stdout
    for words in (
        ", operator 0.1.0, Kubernetes v1.36.1",
        "p1: store: ",
        "answers the operator",
        f"p1: versions: connector {SETTINGS.connector_image}, vLLM 0.32.0 (2 member(s))",
    ):
        assert words in page
    away = ready(pool_p1())
    status = next_status(Gathered(pool_p1(), (), Reach(False, "no connection"), SETTINGS.connector_image, NOW))
    api.objects[POOL] = {**away, "status": as_json(status)}
    assert "p1: store: StoreUnreachable: " in run(monkeypatch, api).stdout


def test_versions_that_cannot_be_read_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check without them is a check."""
    api = Cluster(member(verdict="shared"))
    for path in (HOOKS, "/version"):
        api.faults[path] = ApiError(403, "forbidden")
    result = run(monkeypatch, api)
    assert result.exit_code == 0
    assert "Versions: kvshare " in result.stdout
    assert "Kubernetes" not in result.stdout


def test_table_is_plain_when_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners, states and commands for people."""
    result = run(monkeypatch, Cluster(member(verdict="isolated", reason="HashMismatch", message="[why] it is")))
    assert "\x1b[" not in result.stdout
    for word in (
        "deployment/decode",
        "isolated",
        "HashMismatch",
        RESTART,
        "[why] it is",
        "Remove the engine's own --prefix-caching-hash-algo",
        "certificate until 2027-01-30",
    ):
        assert word in result.stdout
