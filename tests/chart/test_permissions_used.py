"""The chart's permissions against the API server's audit log: what both processes do, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest

from helm_chart import rendered, without_hooks
from installed import Installation, bare_api, installation, until
from kvshare_layout import reports
from kvshare_operator.api import names
from permissions import grants, problems
from pods import Json, annotated, pod_p0, pool_p1
from testbed.audit import Request, requests

pytestmark = pytest.mark.apiserver


def create(place: Installation, name: str, pod: Json) -> Json:
    """Create a pod in namespace `team` and return it as it is stored."""
    pod["metadata"] = {**pod["metadata"], "name": name, "namespace": "team"}
    place.kubectl.within("team").create(json.dumps(pod))
    return place.kubectl.within("team").get("pod", name)


def everything(place: Installation) -> None:
    """Use each thing that the operator does once: pools of both kinds, members, a report, refusals."""
    team = place.kubectl.within("team")
    managed = pool_p1(store={"type": "Managed", "managed": {"capacityPerNode": "1Gi", "image": "example.org/m:1"}})
    managed["metadata"] = {"name": "own", "namespace": "team"}
    external = pool_p1(onConflict="Skip")
    external["metadata"] = {"name": "p1", "namespace": "team"}
    team.apply(managed)
    team.apply(external)
    until(
        lambda: bool(team.list("networkpolicies")) and bool(team.list("statefulsets")), "the store's objects are made"
    )

    def status() -> Json:
        found: Json = team.get("kvsharepool", "p1").get("status", {})
        return found

    until(lambda: status().get("storeTPSize") == 4, "the pool is looked at")
    create(place, "lost", annotated(pod_p0(), pool="nope"))
    create(place, "refused", pod_p0(args=["-tp", "3"]))
    uid = create(place, "member", pod_p0())["metadata"]["uid"]
    token = team.run(
        "create", "token", "default", "--bound-object-kind=Pod", "--bound-object-name=member",
        f"--bound-object-uid={uid}", f"--audience={names.TOKEN_AUDIENCE}",
    ).strip()  # fmt: skip
    report = reports.MemberReport(
        pool_prefix=status()["cacheNamespace"], verdict="shared", reason="Shared", message="shares",
        fingerprint="ab" * 16, namespace="n", store_tp=4, tp=2, pp=1, rank_layouts=("LBNHC",), kv_heads=8,
        block_tokens=16, manifest={"dtype": "float32"}, engine="0.32.0",
    )  # fmt: skip
    assert place.ask("/v1/report", place.report, reports.to_json(report), token)[0] == 200
    until(lambda: status()["members"]["shared"] == 1, "the report is counted")


@pytest.fixture(scope="module", params=["everywhere", "in one namespace"])
def recorded(request: pytest.FixtureRequest) -> Iterator[tuple[list[Json], set[Request]]]:
    """Rendered objects, and the requests of a whole life."""
    values = {"controller": {"fullPassSeconds": 5, "sweepSeconds": 5}}
    narrow = {"watchNamespaces": ["team"]} if request.param == "in one namespace" else {}
    objects = without_hooks(rendered(values={**values, **narrow}))
    with bare_api("team") as (api, folder), installation(api, folder, objects) as place:
        place.start("controller")
        until(lambda: bool(api.kubectl.within("kvshare-system").list("secrets")), "certificates are issued")
        place.mount_secret("kvshare-webhook-certificates")
        place.start("webhook")
        place.wait_until_ready()
        everything(place)
        yield objects, set(requests(api.state))


def test_what_is_granted_is_what_is_used(recorded: tuple[list[Json], set[Request]]) -> None:
    """In both directions; what no log can show is explained one by one."""
    objects, found = recorded
    assert problems(objects, found) == []


def test_a_missing_and_an_unused_permission_are_both_noticed(recorded: tuple[list[Json], set[Request]]) -> None:
    """Each request taken away, and each permission added, is a sentence."""
    objects, found = recorded
    one = next(iter(found & {request for request in found if request.verb == "patch"}))
    assert any("nothing used it" in said for said in problems(objects, found - {r for r in found if r.verb == "patch"}))
    assert any("was refused patch" in said for said in problems(objects, found | {dataclasses.replace(one, code=403)}))
    stranger = dataclasses.replace(one, verb="delete", code=200)
    assert any("does not grant" in said for said in problems(objects, found | {stranger}))
    assert len(list(grants(objects))) > 20
