"""Member reports: a token proves which pod speaks; the pod's conditions say what it said."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from kvshare_layout import reports
from kvshare_operator.api import names
from kvshare_operator.core.pool.members import read_member
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.memory_api import MemoryClusterApi
from kvshare_operator.edges.reports import ReportEndpoint

Json = dict[str, Any]
POD = "/api/v1/namespaces/ns-a/pods/p0"
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
USER = {
    "username": "system:serviceaccount:ns-a:default",
    "extra": {
        "authentication.kubernetes.io/pod-name": ["p0"],
        "authentication.kubernetes.io/pod-uid": ["uid-1"],
    },
}


def report(**fields: Any) -> reports.MemberReport:
    """What a sharing member says."""
    base: Json = {
        "pool_prefix": "kvs1/p-0123456789ab/g1", "verdict": "shared", "reason": "Shared", "message": "shares",
        "fingerprint": "ab" * 16, "namespace": "kvs1/p-0123456789ab/g1/f-" + "ab" * 16, "store_tp": 4, "tp": 2,
        "pp": 1, "rank_layouts": ("LBNHC",), "kv_heads": 8, "block_tokens": 16, "manifest": {"dtype": "float32"},
    }  # fmt: skip
    return reports.MemberReport(**{**base, **fields})


def api(**status: Any) -> MemoryClusterApi:
    """A cluster with one pod, whose token review answers ``status``."""
    pod = {
        "metadata": {"name": "p0", "namespace": "ns-a", "uid": "uid-1", "annotations": {names.POOL: "p1"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    cluster = MemoryClusterApi({POD: pod})
    cluster.answers[REVIEWS] = {
        "status": {"authenticated": True, "audiences": [names.TOKEN_AUDIENCE], "user": USER, **status}
    }
    return cluster


def post(cluster: MemoryClusterApi, body: bytes, token: str | None = "t") -> tuple[int, str]:
    """Post a report; return status and text."""

    async def run() -> tuple[int, str]:
        async with TestClient(TestServer(ReportEndpoint(cluster).app())) as client:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            answer = await client.post("/v1/report", data=body, headers=headers)
            return answer.status, await answer.text()

    return asyncio.run(run())


def test_report_becomes_two_conditions_of_its_own_pod() -> None:
    """One for people and `kubectl wait`, one for the controller; others stay."""
    cluster = api()
    assert post(cluster, reports.to_json(report()))[0] == 200
    conditions = {one["type"]: one for one in cluster.objects[POD]["status"]["conditions"]}
    assert set(conditions) == {"Ready", names.SHARED, names.REPORT}
    assert conditions[names.SHARED]["status"] == "True"
    assert "layout LBNHC" in conditions[names.SHARED]["message"]
    member = read_member(cluster.objects[POD])
    assert member is not None
    assert member.report == report()
    assert cluster.writes == [("POST", REVIEWS), ("PATCH", f"{POD}/status"), ("PATCH", f"{POD}/status")]
    assert post(cluster, reports.to_json(report()))[0] == 200
    assert cluster.writes[3:] == [("POST", REVIEWS), ("PATCH", f"{POD}/status")]  # the verdict stands already


def test_isolated_member_is_not_shared_and_says_why() -> None:
    """Reason and message reach the condition unchanged."""
    cluster = api()
    post(cluster, reports.to_json(report(verdict="isolated", reason="StoreTP", message="TP 3 does not fit")))
    shared = next(one for one in cluster.objects[POD]["status"]["conditions"] if one["type"] == names.SHARED)
    assert (shared["status"], shared["reason"]) == ("False", "StoreTP")
    assert shared["message"].startswith("TP 3 does not fit")


def shared_of(cluster: MemoryClusterApi) -> Json:
    """The condition for people."""
    found: list[Json] = [one for one in cluster.objects[POD]["status"]["conditions"] if one["type"] == names.SHARED]
    return found[0]


def test_worst_engine_of_a_pod_speaks_for_it_in_any_order() -> None:
    """Data parallel: three engines with one pod identity; another verdict of one of them replaces its own only."""
    said = {
        0: report(),
        1: report(engine_index=1, verdict="disabled", reason="InternalError", message="a fault"),
        2: report(engine_index=2, verdict="isolated", reason="StoreTP", message="TP 3 does not fit"),
    }
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        cluster = api()
        for index in order:
            assert post(cluster, reports.to_json(said[index]))[0] == 200
        shared = shared_of(cluster)
        assert (shared["status"], shared["reason"]) == ("False", "InternalError")
        assert "engine 1; 1 of 3 engines that have reported share" in shared["message"]
        member = read_member(cluster.objects[POD])
        assert member is not None
        assert member.report == said[1]
        post(cluster, reports.to_json(report(engine_index=1)))
        assert shared_of(cluster)["reason"] == "StoreTP"
        post(cluster, reports.to_json(report(engine_index=2)))
        assert shared_of(cluster)["status"] == "True"
        assert {c["type"] for c in cluster.objects[POD]["status"]["conditions"]} == {
            "Ready", names.SHARED, names.REPORT, f"{names.REPORT}-1", f"{names.REPORT}-2",
        }  # fmt: skip


def test_engines_that_report_at_the_same_time_do_not_hide_each_other() -> None:
    """The isolated one's whole report falls between the two writes of the other: the verdict is written again."""
    cluster, late = api(), [reports.to_json(report(engine_index=1, verdict="isolated", reason="StoreTP"))]
    plain = cluster.call

    async def interleaved(method: str, path: str, **more: Any) -> Json:
        found = await plain(method, path, **more)
        if method == "PATCH" and late:
            body = late.pop()
            await ReportEndpoint(cluster)._write("ns-a", "p0", "uid-1", reports.from_json(body))
        return found

    cluster.call = interleaved  # type: ignore[method-assign]
    assert post(cluster, reports.to_json(report()))[0] == 200
    assert (shared_of(cluster)["status"], shared_of(cluster)["reason"]) == ("False", "StoreTP")


def test_report_without_an_engine_number_is_of_the_only_engine() -> None:
    """Members of the first release."""
    cluster = api()
    body = json.loads(reports.to_json(report()))
    del body["engine_index"]
    assert post(cluster, json.dumps(body).encode())[0] == 200
    member = read_member(cluster.objects[POD])
    assert member is not None
    assert member.report == report()


def test_caller_that_proves_no_pod_is_denied() -> None:
    """No token, a foreign token, a wrong audience, a token of no pod, a user."""
    body = reports.to_json(report())
    assert post(api(), body, token=None)[0] == 401
    assert post(api(authenticated=False), body)[0] == 401
    assert post(api(audiences=["other"]), body)[0] == 401
    assert post(api(user={"username": "system:serviceaccount:ns-a:default"}), body)[0] == 401
    assert post(api(user={**USER, "username": "admin"}), body)[0] == 401


def test_report_that_breaks_the_rules_stores_nothing() -> None:
    """Every mistake is named; nothing of it is used."""
    cluster = api()
    for body in (b"", b"[]", b'{"version":1}', b'{"version":9}', b"\xff"):
        status, text = post(cluster, body)
        assert status == 400
        assert text.strip()
    assert ("PATCH", f"{POD}/status") not in cluster.calls


def test_pod_that_is_gone_and_api_that_fails_have_their_own_answers() -> None:
    """A member tries again only where that helps."""
    gone = api()
    del gone.objects[POD]
    assert post(gone, reports.to_json(report()))[0] == 404
    broken = api()
    broken.faults[f"{POD}/status"] = ApiError(500, "etcd")
    assert post(broken, reports.to_json(report()))[0] == 503
