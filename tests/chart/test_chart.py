"""The chart as helm renders it: restricted, minimal, explicit, and the same every time."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from helm_chart import CHART, environment_of, helm, one, rendered, without_hooks
from kvshare_operator.api import crd
from kvshare_operator.core.injection.surroundings import COLLIDING_SERVICES
from kvshare_operator.settings import read_settings
from pods import Json, pod_p0
from testbed.cluster import Cluster, api_server
from testbed.kubectl import KubectlError

pytestmark = pytest.mark.apiserver


@pytest.fixture(scope="module")
def objects() -> list[Json]:
    """The chart with its defaults."""
    return rendered()


def test_lint_finds_nothing() -> None:
    """Strict."""
    finished = helm("lint", "--strict", str(CHART))
    assert finished.returncode == 0, finished.stdout


def test_rendering_twice_gives_the_same() -> None:
    """B49: nothing is made up while rendering."""
    assert rendered() == rendered()


def test_names_follow_the_release(objects: list[Json]) -> None:
    """Release `kvshare` gives Service `kvshare-webhook`; another release its own names everywhere."""
    ports = one(objects, "Service", "kvshare-webhook")["spec"]["ports"]
    assert {(port["port"], port["targetPort"]) for port in ports} == {(443, "admission"), (9444, "report")}
    other = rendered(release="blue")
    hook = one(other, "MutatingWebhookConfiguration", "blue-kvshare")["webhooks"][0]
    assert hook["clientConfig"]["service"]["name"] == "blue-kvshare-webhook"
    assert one(other, "Service", "blue-kvshare-webhook")


def test_variables_of_both_processes_are_settings_they_know(objects: list[Json]) -> None:
    """Names and values as the processes read them; certificates and report URL agree with the Service."""
    for process in ("controller", "webhook"):
        container = one(objects, "Deployment", f"kvshare-{process}")["spec"]["template"]["spec"]["containers"][0]
        environment = environment_of(objects, process)
        known = {f"KVSHARE_{field.upper()}" for field in vars(read_settings({}))}
        assert set(environment) <= known
        assert read_settings(environment).report_url.startswith("https://kvshare-webhook.kvshare-system.svc:9444/")
        assert container["args"] == [process]


def test_webhook_writes_every_field_that_has_a_default_and_no_ca(objects: list[Json]) -> None:
    """B04, B51: CREATE only; tools that compare see no difference; the controller owns caBundle."""
    (hook,) = one(objects, "MutatingWebhookConfiguration", "kvshare")["webhooks"]
    assert [rule["operations"] for rule in hook["rules"]] == [["CREATE"]]
    explicit = {
        "admissionReviewVersions", "clientConfig", "failurePolicy", "matchConditions", "matchPolicy", "name",
        "namespaceSelector", "objectSelector", "reinvocationPolicy", "rules", "sideEffects", "timeoutSeconds",
    }  # fmt: skip
    assert set(hook) == explicit
    assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == ("Ignore", "None", 5)
    assert set(hook["clientConfig"]) == {"service"}
    assert set(hook["clientConfig"]["service"]) == {"name", "namespace", "path", "port"}
    assert all(condition["expression"].startswith("has(") for condition in hook["matchConditions"])


def test_pods_pass_the_restricted_standard_without_a_fixed_user(objects: list[Json]) -> None:
    """F5: any user id, nothing to write to, no service links that shadow settings."""
    for process in ("controller", "webhook"):
        spec = one(objects, "Deployment", f"kvshare-{process}")["spec"]["template"]["spec"]
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert spec["enableServiceLinks"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= set(container["resources"])
        assert "POD_ID" in str(spec)


MANAGED_STORE = {
    (resource, "get,create,patch")
    for resource in ("deployments", "statefulsets", "services", "poddisruptionbudgets", "networkpolicies")
}


def test_permissions_for_managed_stores_go_with_their_switch() -> None:
    """Without it the controller writes nothing but status and events, and is told so."""
    objects = rendered("managedStore.enabled=false")
    rules = one(objects, "ClusterRole", "kvshare-controller")["rules"]
    assert not {resource for rule in rules for resource in rule["resources"]} & {name for name, _ in MANAGED_STORE}
    assert read_settings(environment_of(objects, "controller")).managed_store == "Disabled"


def test_image_and_user_of_managed_stores_reach_the_controller() -> None:
    """As the values say."""
    sets = ("managedStore.image=example.org/mooncake:1", "managedStore.pullSecrets={a,b}", "managedStore.runAsUser=0")
    store = read_settings(environment_of(rendered(*sets), "controller")).store
    assert (store.image, store.pull_secrets, store.run_as_user) == ("example.org/mooncake:1", ("a", "b"), 0)
    assert (store.operator_namespace, store.pull_policy) == ("kvshare-system", "IfNotPresent")


def test_permissions_are_the_smallest(objects: list[Json]) -> None:
    """No pod write, one Secret by name, one webhook configuration by name."""
    wanted = {
        "kvshare-webhook": {
            ("kvsharepools", "get,list,watch"), ("customresourcedefinitions", "list,watch"),
            ("tokenreviews", "create"), ("pods/status", "patch"), ("services", "get"),
        },
        "kvshare-controller": {
            ("kvsharepools", "list,watch"), ("kvsharepools/status", "patch"), ("pods", "list,watch"),
            ("customresourcedefinitions", "list,watch"), ("events", "create"),
            ("mutatingwebhookconfigurations", "get,patch"),
        } | MANAGED_STORE,
    }  # fmt: skip
    for name, permissions in wanted.items():
        rules = one(objects, "ClusterRole", name)["rules"]
        found = {(resource, ",".join(rule["verbs"])) for rule in rules for resource in rule["resources"]}
        assert found == permissions
    (services,) = [
        rule for rule in one(objects, "ClusterRole", "kvshare-webhook")["rules"] if rule["resources"] == ["services"]
    ]
    assert services["resourceNames"] == list(COLLIDING_SERVICES)
    (named,) = one(objects, "Role", "kvshare-controller")["rules"]
    assert (named["resources"], named["resourceNames"]) == (["secrets"], ["kvshare-webhook-certificates"])
    assert not any(
        rule.get("resources") == ["secrets"]
        for thing in objects
        if thing["kind"] == "ClusterRole"
        for rule in thing["rules"]
    )


def test_ca_key_never_reaches_a_webhook(objects: list[Json]) -> None:
    """Only what a server needs is mounted."""
    (volume,) = one(objects, "Deployment", "kvshare-webhook")["spec"]["template"]["spec"]["volumes"]
    (source,) = volume["projected"]["sources"]
    assert {item["key"] for item in source["secret"]["items"]} == {"ca.crt", "tls.crt", "tls.key"}


def test_controller_is_single_and_webhook_survives_a_drain(objects: list[Json]) -> None:
    """Recreate; two replicas with a budget and a rolling update that never goes below."""
    controller = one(objects, "Deployment", "kvshare-controller")["spec"]
    assert (controller["replicas"], controller["strategy"]) == (1, {"type": "Recreate"})
    webhook = one(objects, "Deployment", "kvshare-webhook")["spec"]
    assert webhook["replicas"] == 2
    assert webhook["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert one(objects, "PodDisruptionBudget", "kvshare-webhook")


def test_crd_comes_with_the_chart_is_kept_and_can_be_left_out(objects: list[Json]) -> None:
    """Removing the release does not remove pools."""
    found = one(objects, "CustomResourceDefinition", "kvsharepools.kvshare.dev")
    assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert found["spec"] == crd.definition()["spec"]
    without = rendered("crds.enabled=false")
    assert not any(thing["kind"] == "CustomResourceDefinition" for thing in without)
    removable = one(rendered("crds.keep=false"), "CustomResourceDefinition", "kvsharepools.kvshare.dev")
    assert "annotations" not in removable["metadata"]


def test_network_policies_are_off_until_asked_for(objects: list[Json]) -> None:
    """They need a plugin that knows them."""
    assert not any(thing["kind"] == "NetworkPolicy" for thing in objects)
    assert sum(thing["kind"] == "NetworkPolicy" for thing in rendered("networkPolicies.enabled=true")) == 2


def test_no_service_makes_variables_that_vllm_or_mooncake_read(objects: list[Json]) -> None:
    """B36: a Service `vllm` would set VLLM_PORT in every pod of its namespace."""
    names = [thing["metadata"]["name"] for thing in objects if thing["kind"] == "Service"]
    assert names == ["kvshare-webhook"]
    assert not any(name.startswith(("vllm", "mooncake")) for name in names)


@pytest.fixture(scope="module")
def api() -> Iterator[Cluster]:
    """A bare API server with the chart's configuration, failing closed; nothing serves behind it."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as running,
    ):
        for namespace in ("kvshare-system", "team"):
            running.kubectl.run("create", "namespace", namespace)
        for namespace in ("kvshare-system", "team", "kube-system"):
            account = {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default", "namespace": namespace},
            }
            running.kubectl.within(namespace).apply(account)
        for thing in without_hooks(rendered("webhook.failurePolicy=Fail")):
            running.kubectl.within(thing["metadata"].get("namespace", "default")).apply(thing)
        yield running


def pod_in(namespace: str, annotations: Any) -> Json:
    """A pod with or without the opt-in."""
    pod = pod_p0()
    pod["metadata"] = {"name": f"pod-{namespace}", "namespace": namespace}
    if annotations is not None:
        pod["metadata"]["annotations"] = annotations
    return pod


def test_every_object_is_accepted_and_conditions_keep_others_out(api: Cluster) -> None:
    """B52: without opt-in, in kube-system and in our own namespace the webhook is not called, even with Fail."""
    opted_in = {"kvshare.dev/pool": "p1"}
    for namespace, written in (
        ("team", None),
        ("team", {"other": "x"}),
        ("kube-system", opted_in),
        ("kvshare-system", opted_in),
    ):
        pod = pod_in(namespace, written)
        api.kubectl.within(namespace).apply(pod)
        api.kubectl.within(namespace).delete("pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    with pytest.raises(KubectlError, match=r"inject\.kvshare\.dev"):
        api.kubectl.within("team").apply(pod_in("team", opted_in))


def test_applying_again_leaves_the_ca_that_the_controller_wrote(api: Cluster) -> None:
    """B51: helm and GitOps do not own caBundle."""
    configuration = one(rendered("webhook.failurePolicy=Fail"), "MutatingWebhookConfiguration", "kvshare")
    bundle = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg=="
    patch = f'[{{"op":"add","path":"/webhooks/0/clientConfig/caBundle","value":"{bundle}"}}]'
    api.kubectl.run(
        "patch",
        "mutatingwebhookconfiguration",
        "kvshare",
        "--type=json",
        "-p",
        patch,
        "--field-manager=kvshare-controller",
    )
    api.kubectl.apply(configuration)
    stored = api.kubectl.get("mutatingwebhookconfiguration", "kvshare")
    assert stored["webhooks"][0]["clientConfig"]["caBundle"] == bundle
