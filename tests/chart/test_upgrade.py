"""`helm upgrade` from the chart of the first cut, back, and out: pools and the user's values survive all of it.

`testdata/first-cut` is that chart as `helm package` made it; the first released one will take its place.
"""

from __future__ import annotations

import base64
import json
import pathlib
from collections.abc import Iterator

import pytest

from helm_chart import CHART, NAMESPACE, helm, one
from installed import bare_api
from pods import Json, pool_p1
from testbed.cluster import Cluster
from testbed.kubectl import KubectlError

pytestmark = pytest.mark.apiserver
FIRST = pathlib.Path(__file__).parent / "testdata" / "first-cut" / "kvshare-0.1.0.tgz"
CHOSEN = ("webhook.replicas=3", "controller.nodeSelector.disk=ssd", "webhook.excludedNamespaces={sandbox}")
OBJECTS = (
    "deployments,services,poddisruptionbudgets,roles,rolebindings,clusterroles,clusterrolebindings,"
    "mutatingwebhookconfigurations,serviceaccounts"
)


class Release:
    """One release on an API server."""

    def __init__(self, api: Cluster) -> None:
        self.api = api
        self.first: Json = {}

    def run(self, *words: str) -> str:
        """Run helm and return what it prints."""
        finished = helm(*words, "--namespace", NAMESPACE, "--kubeconfig", str(self.api.kubeconfig))
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def pool(self) -> Json:
        """What must survive of the pool."""
        found = self.api.kubectl.within("team").get("kvsharepool", "p1")
        return {"uid": found["metadata"]["uid"], "spec": found["spec"], "status": found.get("status")}

    def keeps_pool(self) -> bool:
        """Whether the pool is still all that it was at first; a newer resource may add fields with their defaults."""
        return _within(self.first, self.pool())

    def values(self) -> Json:
        """What the user chose."""
        found: Json = json.loads(self.run("get", "values", "kvshare", "-o", "json"))
        return found

    def objects(self) -> list[Json]:
        """Everything of the release that is in the cluster."""
        found: list[Json] = []
        for kind in OBJECTS.split(","):
            found.extend(self.api.kubectl.within(NAMESPACE).list(kind, "app.kubernetes.io/instance=kvshare"))
        return found


def _within(old: object, new: object) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and _within(value, new[key]) for key, value in old.items())
    return old == new


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    """The first cut with some values of the user's, and a pool with a status."""
    with bare_api("team") as (api, _):
        made = Release(api)
        made.run("install", "kvshare", str(FIRST), *(word for value in CHOSEN for word in ("--set", value)))
        api.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
        pool = pool_p1(reservedTensorParallelSizes=[8])
        pool["metadata"] = {"name": "p1", "namespace": "team"}
        api.kubectl.within("team").apply(pool)
        status = {"status": {"storeTPSize": 8, "cacheNamespace": "kvs1/p-0123456789ab/g1", "observedGeneration": 1}}
        api.kubectl.within("team").run(
            "patch", "kvsharepool", "p1", "--subresource=status", "--type=merge", "-p", json.dumps(status)
        )
        made.first = made.pool()
        yield made


def test_values_of_an_older_chart_alone_are_refused_with_what_to_do(release: Release) -> None:
    """`--reuse-values` brings no new defaults: said before anything is changed, not as an error about nil."""
    before = {(one["kind"], one["metadata"]["name"]): one["metadata"]["resourceVersion"] for one in release.objects()}
    words = ("upgrade", "kvshare", str(CHART), "--reuse-values", "--namespace", NAMESPACE)
    finished = helm(*words, "--kubeconfig", str(release.api.kubeconfig))
    assert finished.returncode != 0
    assert "certificates.caBundle" in finished.stderr
    assert "use --reset-then-reuse-values" in finished.stderr
    after = {(one["kind"], one["metadata"]["name"]): one["metadata"]["resourceVersion"] for one in release.objects()}
    assert after == before


def test_upgrade_keeps_pools_and_values_and_brings_what_is_new(release: Release) -> None:
    """No object has to be deleted first, no immutable field changes; new values have their defaults."""
    values = release.values()
    assert release.first["status"]["storeTPSize"] == 8
    uids = {(thing["kind"], thing["metadata"]["name"]): thing["metadata"]["uid"] for thing in release.objects()}
    release.run("upgrade", "kvshare", str(CHART), "--reset-then-reuse-values")
    assert release.keeps_pool()
    assert release.values() == values
    objects = release.objects()
    assert {(thing["kind"], thing["metadata"]["name"]): thing["metadata"]["uid"] for thing in objects}.items() >= (
        uids.items()
    )
    webhook = one(objects, "Deployment", "kvshare-webhook")["spec"]
    assert webhook["replicas"] == 3
    assert webhook["template"]["spec"]["topologySpreadConstraints"]
    assert "projected" in webhook["template"]["spec"]["volumes"][0]
    assert one(objects, "Deployment", "kvshare-controller")["spec"]["template"]["spec"]["nodeSelector"] == {
        "disk": "ssd"
    }
    hook = one(objects, "MutatingWebhookConfiguration", "kvshare")["webhooks"][0]
    assert "sandbox" in hook["namespaceSelector"]["matchExpressions"][0]["values"]


def test_sticky_store_tp_of_an_older_pool_still_holds(release: Release) -> None:
    """The resource that came with the upgrade reads the status that was there before."""
    with pytest.raises(KubectlError, match="would move Store TP"):
        release.api.kubectl.within("team").run(
            "patch", "kvsharepool", "p1", "--type=merge", "-p", '{"spec":{"prefill":{"tensorParallelSizes":[3]}}}'
        )


def test_second_upgrade_changes_nothing(release: Release) -> None:
    """B49: nothing is made up while rendering."""
    before = {(one["kind"], one["metadata"]["name"]): one["metadata"]["resourceVersion"] for one in release.objects()}
    release.run("upgrade", "kvshare", str(CHART), "--reset-then-reuse-values")
    after = {(one["kind"], one["metadata"]["name"]): one["metadata"]["resourceVersion"] for one in release.objects()}
    assert after == before


def test_namespaces_can_be_narrowed_by_an_upgrade(release: Release) -> None:
    """ClusterRoles shrink, Roles appear; the pool does not notice."""
    release.run("upgrade", "kvshare", str(CHART), "--reset-then-reuse-values", "--set", "watchNamespaces={team}")
    assert release.keeps_pool()
    (rule,) = one(release.objects(), "ClusterRole", "kvshare-webhook")["rules"]
    assert rule["resources"] == ["tokenreviews"]
    assert release.api.kubectl.within("team").get("role", "kvshare-webhook")


def test_certificates_can_be_taken_over_from_the_controller_and_given_back(
    release: Release, tmp_path: pathlib.Path
) -> None:
    """With `--force-conflicts`, as the guide says: the field is the controller's. The way back needs nothing."""
    bundle = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg=="
    written = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "kvshare"},
        "webhooks": [{"name": "inject.kvshare.dev", "clientConfig": {"caBundle": bundle}}],
    }

    def controller_writes() -> None:
        """As the controller does."""
        release.api.kubectl.run(
            "apply", "--server-side", "--force-conflicts", "--field-manager=kvshare-controller", "--validate=false",
            "-f", "-", stdin=json.dumps(written),
        )  # fmt: skip

    def trusted() -> str:
        """What the API server trusts."""
        hook = one(release.objects(), "MutatingWebhookConfiguration", "kvshare")["webhooks"][0]
        return str(hook["clientConfig"].get("caBundle", ""))

    controller_writes()
    authority = tmp_path / "ca.crt"
    authority.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    release.run(
        "upgrade", "kvshare", str(CHART), "--reset-then-reuse-values", "--force-conflicts",
        "--set=certificates.mode=Secret",
        "--set=certificates.secretName=mine", f"--set-file=certificates.caBundle={authority}",
    )  # fmt: skip
    assert base64.b64decode(trusted()).decode() == authority.read_text()
    release.run("upgrade", "kvshare", str(CHART), "--reset-values")
    controller_writes()
    release.run("upgrade", "kvshare", str(CHART), "--reset-values", *(f"--set={value}" for value in CHOSEN))
    assert trusted() == bundle


def test_rollback_to_the_first_cut_keeps_pools(release: Release) -> None:
    """The Roles of the namespaces go, the old pods' spec comes back; the resource is the older one again."""
    release.run("rollback", "kvshare", "1")
    assert release.keeps_pool()
    webhook = one(release.objects(), "Deployment", "kvshare-webhook")["spec"]["template"]["spec"]
    assert webhook["volumes"][0]["secret"]["secretName"] == "kvshare-webhook-certificates"
    assert "projected" not in webhook["volumes"][0]
    assert release.api.kubectl.within("team").list("roles") == []
    assert release.values()["webhook"]["replicas"] == 3


def test_uninstall_leaves_the_resource_and_all_pools(release: Release) -> None:
    """`helm install` afterwards takes both up again."""
    release.run("uninstall", "kvshare")
    assert release.objects() == []
    assert release.keeps_pool()
    release.run("install", "kvshare", str(CHART))
    assert release.keeps_pool()
