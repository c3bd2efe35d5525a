"""The chart in some namespaces only: permissions, webhook and watches end there, and everything works with no more."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from helm_chart import environment_of, one, refused, rendered
from installed import Installation, bare_api, installation, until
from kvshare_layout import reports
from kvshare_operator.api import names
from kvshare_operator.settings import read_settings
from pods import Json, pod_p0, pool_p1
from testbed.kubectl import KubectlError

pytestmark = pytest.mark.apiserver
VALUES: Json = {"watchNamespaces": ["team", "other"], "webhook": {"failurePolicy": "Fail"}}


@pytest.fixture(scope="module")
def objects() -> list[Json]:
    """The chart for two namespaces."""
    return rendered(values=VALUES)


def roles(objects: list[Json], kind: str) -> dict[tuple[str, str], set[str]]:
    """(namespace, name) of each role -> resources that it grants."""
    return {
        (role["metadata"].get("namespace", ""), role["metadata"]["name"]): {
            resource for rule in role["rules"] for resource in rule["resources"]
        }
        for role in objects
        if role["kind"] == kind and not role["metadata"].get("annotations")
    }


def test_only_what_has_no_namespace_is_granted_in_the_whole_cluster(objects: list[Json]) -> None:
    """TokenReview, and the webhook configuration while the controller makes certificates; everything else by Roles."""
    assert roles(objects, "ClusterRole") == {
        ("", "kvshare-webhook"): {"tokenreviews"},
        ("", "kvshare-controller"): {"mutatingwebhookconfigurations"},
    }
    granted = roles(objects, "Role")
    everywhere = {role[1]: resources for role, resources in roles(rendered(), "ClusterRole").items()}
    for namespace in VALUES["watchNamespaces"]:
        assert granted[namespace, "kvshare-webhook"] == {"kvsharepools", "services", "pods/status"}
        for process in ("kvshare-webhook", "kvshare-controller"):
            assert granted[namespace, process] <= everywhere[process]
    assert {namespace for namespace, _ in granted} == {"team", "other", "kvshare-system"}


def test_controller_without_certificates_of_its_own_has_no_cluster_role() -> None:
    """With cert-manager only the webhook's TokenReview remains."""
    objects = rendered(values={**VALUES, "certificates": {"mode": "CertManager"}})
    assert roles(objects, "ClusterRole") == {("", "kvshare-webhook"): {"tokenreviews"}}


def test_webhook_selects_the_namespaces_by_name_and_both_processes_know_them(objects: list[Json]) -> None:
    """The API server does not even ask about pods elsewhere."""
    hook = one(objects, "MutatingWebhookConfiguration", "kvshare")["webhooks"][0]
    first, second = hook["namespaceSelector"]["matchExpressions"]
    assert first == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team", "other"]}
    assert second["operator"] == "NotIn"
    for process in ("controller", "webhook"):
        assert read_settings(environment_of(objects, process)).watch_namespaces == ("team", "other")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"watchNamespaces": ["kube-system"]}, "watchNamespaces: kube-system given"),
        ({"watchNamespaces": ["kvshare-system"]}, "watchNamespaces: kvshare-system given"),
        ({"watchNamespaces": ["a"], "webhook": {"excludedNamespaces": ["a"]}}, "watchNamespaces: a given"),
        ({"watchNamespaces": ["A"]}, "pattern"),
        ({"watchNamespaces": ["a", "a"]}, "items at 0 and 1 are equal"),
        ({"watchNamespaces": "a"}, "want array"),
        ({"watchNamespaces": ["a"], "helmTest": {"namespace": "b"}}, "helmTest.namespace: b given, one of"),
    ],
)
def test_namespaces_that_cannot_be_meant_are_refused(values: Json, words: str) -> None:
    """Pods there would never be looked at."""
    assert words in refused(values)


@pytest.fixture(scope="module")
def place(objects: list[Json]) -> Iterator[Installation]:
    """Both processes serve two of three namespaces, with the permissions that the chart grants there."""
    with (
        bare_api("team", "other", "foreign") as (api, folder),
        installation(api, folder, objects) as made,
    ):
        made.start("controller")
        until(lambda: bool(made.kubectl.within("kvshare-system").list("secrets")), "certificates are issued")
        made.mount_secret("kvshare-webhook-certificates")
        made.start("webhook")
        made.wait_until_ready()
        for namespace in ("team", "other", "foreign"):
            pool = pool_p1(onConflict="Reject")
            pool["metadata"] = {"name": "p1", "namespace": namespace}
            made.kubectl.within(namespace).apply(pool)
        yield made


def create(place: Installation, namespace: str, name: str) -> Json:
    """Create a pod of pool p1 and return it as it is stored."""
    pod = pod_p0()
    pod["metadata"].update(name=name, namespace=namespace)
    place.kubectl.within(namespace).create(json.dumps(pod))
    return place.kubectl.within(namespace).get("pod", name)


def status(place: Installation, namespace: str) -> Json:
    """The pool's status in a namespace."""
    found: Json = place.kubectl.within(namespace).get("kvsharepool", "p1").get("status", {})
    return found


def total(place: Installation, namespace: str) -> int:
    """How many members the pool has."""
    return int(status(place, namespace).get("members", {}).get("total", 0))


def test_pods_of_both_namespaces_are_injected_and_counted(place: Installation) -> None:
    """Injection, watch, status and events with Roles only."""
    for namespace in ("team", "other"):
        stored = create(place, namespace, "member")
        assert json.loads(stored["metadata"]["annotations"][names.INJECTED])["storeTP"] == 4
        until(lambda where=namespace: total(place, where) == 1, "it is counted")  # type: ignore[misc]


def test_pod_elsewhere_starts_as_it_was_and_its_pool_is_left_alone(place: Installation) -> None:
    """Even with a webhook that fails closed."""
    stored = create(place, "foreign", "stranger")
    assert names.INJECTED not in stored["metadata"]["annotations"]
    assert status(place, "foreign") == {}


def test_review_of_a_pod_elsewhere_changes_nothing_when_it_arrives_all_the_same(place: Installation) -> None:
    """An older configuration, or somebody else's."""
    pod = pod_p0()
    pod["metadata"].update(name="x", namespace="foreign")
    request = {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "foreign", "operation": "CREATE", "object": pod}
    code, text = place.ask("/inject", place.admission, json.dumps({"request": request}).encode())
    assert (code, json.loads(text)["response"]) == (200, {"uid": "u", "allowed": True})


def test_report_reaches_the_pod_through_the_token_review(place: Installation) -> None:
    """The one permission of the webhook that no Role can grant."""
    uid = place.kubectl.within("team").get("pod", "member")["metadata"]["uid"]
    token = place.kubectl.within("team").run(
        "create", "token", "default", "--bound-object-kind=Pod", "--bound-object-name=member",
        f"--bound-object-uid={uid}", f"--audience={names.TOKEN_AUDIENCE}",
    ).strip()  # fmt: skip
    report = reports.MemberReport(
        pool_prefix=status(place, "team")["cacheNamespace"], verdict="shared", reason="Shared", message="shares",
        fingerprint="ab" * 16, namespace="n", store_tp=4, tp=2, pp=1, rank_layouts=("LBNHC",), kv_heads=8,
        block_tokens=16, manifest={"dtype": "float32"}, engine="0.32.0",
    )  # fmt: skip
    assert place.ask("/v1/report", place.report, reports.to_json(report), token) == (200, "stored\n")
    until(lambda: status(place, "team")["members"]["shared"] == 1, "the report is counted")


def test_neither_process_asks_for_more_than_it_may(place: Installation) -> None:
    """No refusal in either log; the accounts really are limited."""
    for process in ("controller", "webhook"):
        log = place.log(process)
        assert "forbidden" not in log.lower(), log
        assert "permission" not in log.lower(), log
        account = f"system:serviceaccount:kvshare-system:kvshare-{process}"
        with pytest.raises(KubectlError, match="forbidden"):
            place.kubectl.run("get", "--raw", "/apis/kvshare.dev/v1alpha1/kvsharepools", "--as", account)
        place.kubectl.run("get", "--raw", "/apis/kvshare.dev/v1alpha1/namespaces/team/kvsharepools", "--as", account)
