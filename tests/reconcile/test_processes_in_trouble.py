"""Both processes on a real API server when things are not as they should be.

Objects stored under looser rules, two webhooks on one certificate, two configurations for one server, foreign peering
objects, and a controller that is killed again and again. It counts every write that reaches the API server.
"""

from __future__ import annotations

import json
import pathlib
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvshare_operator.api import crd, names
from operator_processes import OperatorProcesses, api_writes, looked_again, metric, until
from pods import Json, pod_p0, pool_p1
from testbed.cluster import Cluster, api_server
from testbed.kubectl import KubectlError

pytestmark = pytest.mark.apiserver
LOOSE: dict[str, Any] = {
    "twenty": {"prefill": {"tensorParallelSizes": list(range(1, 21))}},
    "zero": {"prefill": {"tensorParallelSizes": [0]}},
    "text": {"prefill": {"tensorParallelSizes": "4,2"}},
    "bools": {"prefill": {"tensorParallelSizes": [True, False]}},
    "huge": {"prefill": {"tensorParallelSizes": [10**30]}},
    "empty": {"prefill": {}},
    "nothing": {"prefill": None, "model": None, "store": None},
    "two-stores": {"store": {"type": "External", "managed": {"capacityPerNode": "1Gi"}}},
    "capacity": {"store": {"type": "Managed", "managed": {"capacityPerNode": 5, "nodes": -1}}},
    "address": {"store": {"type": "External", "external": {"masterAddress": "no-port"}}},
    "quantity": {"connector": {"stagingMemoryPerRank": "much"}},
}


class Place(OperatorProcesses):
    """An API server with a controller and two webhooks that share one certificate."""

    def __init__(self, api: Cluster, folder: pathlib.Path) -> None:
        super().__init__(api.kubeconfig, folder, ("webhook-1", "webhook-2"), sweep_seconds=1, drain_seconds=1)
        self.api, self.kubectl = api, api.kubectl

    def status(self, pool: str) -> Json:
        """A pool's status."""
        found: Json = self.kubectl.get("kvsharepool", pool).get("status", {})
        return found

    def conditions(self, pool: str) -> dict[str, Json]:
        """A pool's conditions by type."""
        return {one["type"]: one for one in self.status(pool).get("conditions", [])}

    def said(self, pool: str) -> str:
        """Why a pool is not accepted: by its condition, or by an event where no status can be written."""
        accepted = self.conditions(pool).get("Accepted", {})
        events = [one["reason"] for one in self.kubectl.list("events") if one["involvedObject"]["name"] == pool]
        found: str = accepted.get("reason") or (events[0] if events else "")
        return found


def loose_crd() -> Json:
    """The resource as an early version might have had it: nothing is checked."""
    made: Json = yaml.safe_load(crd.manifest())
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    for version in made["spec"]["versions"]:
        properties = {"spec": anything, "status": anything}
        version["schema"]["openAPIV3Schema"] = {"type": "object", "properties": properties}
    return made


def configuration(name: str, port: int) -> Json:
    """A webhook configuration for a webhook on this machine."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [
            {
                "name": "inject.kvshare.dev",
                "admissionReviewVersions": ["v1"],
                "clientConfig": {"url": f"https://localhost:{port}/inject"},
                "rules": [rule],
                "failurePolicy": "Fail",
                "reinvocationPolicy": "IfNeeded",
                "sideEffects": "None",
            }
        ],
    }


def pool(name: str, **spec: Any) -> Json:
    """A pool like p1 in the default namespace."""
    made = pool_p1(**{key: value for key, value in spec.items() if value is not None})
    made["metadata"] = {"name": name, "namespace": "default"}
    return made


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """Odd objects were stored before the present rules came; a foreign operator's peering object wants us to pause."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as api,
    ):
        made = Place(api, pathlib.Path(folder))
        try:
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            api.kubectl.apply(account, configuration("kvshare", made.admission_ports["webhook-1"]), loose_crd())
            api.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
            until(lambda: applied(made, pool("p1")), "the resource is served")
            for name, spec in LOOSE.items():
                odd = pool(name)
                odd["spec"].update(spec)
                made.kubectl.apply(odd)
            peering(made)
            api.kubectl.apply(crd.manifest())
            until(
                lambda: not applied(made, pool("late", prefill={"tensorParallelSizes": [0]})), "the rules are in force"
            )
            made.start_all(api.kubectl)
            yield made
        finally:
            made.end_all()


def applied(place: Place, thing: Json) -> bool:
    """Whether an object is taken."""
    try:
        place.kubectl.apply(thing)
    except KubectlError:
        return False
    return True


def peering(place: Place) -> None:
    """Another operator's peering object, with a priority that pauses every operator that takes part."""
    resource = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "clusterkopfpeerings.kopf.dev"},
        "spec": {
            "scope": "Cluster",
            "group": "kopf.dev",
            "names": {"kind": "ClusterKopfPeering", "plural": "clusterkopfpeerings", "singular": "clusterkopfpeering"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                }
            ],
        },
    }
    place.kubectl.apply(resource)
    place.kubectl.run("wait", "--for=condition=Established", "crd/clusterkopfpeerings.kopf.dev", "--timeout=30s")
    foreign = {
        "apiVersion": "kopf.dev/v1",
        "kind": "ClusterKopfPeering",
        "metadata": {"name": "default"},
        "status": {"other": {"priority": 1000, "lifetime": 3600, "lastseen": "2099-01-01T00:00:00"}},
    }
    until(lambda: applied(place, foreign), "the peering object is there")


def test_objects_stored_under_looser_rules_are_said_to_be_invalid_and_others_are_served(place: Place) -> None:
    """B60, B58: eleven broken pools beside a good one; no crash, no guess, and foreign peering pauses nobody.

    The API server takes no status of some of them, because its own rules cannot be evaluated: an event says it.
    """
    until(
        lambda: place.kubectl.get("kvsharepool", "p1").get("status", {}).get("storeTPSize") == 4,
        "the good one resolves",
    )
    for name in LOOSE:
        until(lambda: place.said(name) != "", f"pool {name} is looked at")  # noqa: B023 - it ends before the next
        assert (name, place.said(name)) == (name, "SpecInvalid")
        assert "storeTPSize" not in place.status(name), name
    assert place.processes["controller"].poll() is None
    assert "Traceback" not in place.log("controller")


def test_pod_of_a_pool_that_breaks_the_rules_starts_as_it_was(place: Place) -> None:
    """B60: trouble of the pool never denies a pod; the record says what is wrong."""
    for name in LOOSE:
        pod = pod_p0()
        pod["metadata"].update(name=f"of-{name}", namespace="default", annotations={names.POOL: name})
        place.kubectl.create(json.dumps(pod))
        stored = place.kubectl.get("pod", f"of-{name}")
        assert json.loads(stored["metadata"]["annotations"][names.INJECTED])["reason"] == "PoolNotReady"
        assert stored["spec"]["containers"][0]["args"] == ["--tensor-parallel-size", "2"]
    place.kubectl.run("delete", "pods", "--all", "--grace-period=0", "--force")
    assert "Traceback" not in place.log("webhook-1")


def test_two_webhooks_serve_one_certificate_and_two_configurations_inject_once(place: Place) -> None:
    """B50, B55: one caBundle verifies both; the second call meets its own output and changes nothing."""
    place.kubectl.apply(configuration("zz-renamed", place.admission_ports["webhook-2"]))
    bundle = place.kubectl.get("mutatingwebhookconfiguration", "kvshare")["webhooks"][0]["clientConfig"]["caBundle"]
    patch = [{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
    target = ("mutatingwebhookconfiguration", "zz-renamed")
    place.kubectl.run("patch", *target, "--type=json", f"--patch={json.dumps(patch)}")
    before = {name: metric(port, "kvshare_operator_reviews_total") for name, port in place.health.items()}
    pod = pod_p0()
    pod["metadata"].update(name="twice", namespace="default")

    def both_asked() -> bool:
        place.kubectl.delete("pod", "twice", "--grace-period=0", "--force")
        place.kubectl.create(json.dumps(pod))
        after = {name: metric(port, "kvshare_operator_reviews_total") for name, port in place.health.items()}
        return all(after[name] > before[name] for name in place.admission_ports)

    until(both_asked, "both configurations are called")
    args = place.kubectl.get("pod", "twice")["spec"]["containers"][0]["args"]
    assert len(args) == len(set(args))
    assert sum("kv_connector=KVShareConnector" in word for word in args) == 1
    place.kubectl.delete("pod", "twice", "--grace-period=0", "--force")
    place.kubectl.delete(*target)


def test_pod_of_more_than_a_megabyte_is_injected(place: Place) -> None:
    """5.3: as large as the API server stores one."""
    pod = pod_p0(env=[{"name": "LARGE", "value": "x" * 1_200_000}])
    pod["metadata"].update(name="large", namespace="default")
    place.kubectl.create(json.dumps(pod))
    assert names.MEMBER in place.kubectl.get("pod", "large")["metadata"]["labels"]
    place.kubectl.delete("pod", "large", "--grace-period=0", "--force")


def test_nothing_is_written_over_many_passes(place: Place) -> None:
    """F1, B61: by the API server's own count of every resource, with broken pools, members and an absent store."""
    pod = pod_p0()
    pod["metadata"].update(name="member", namespace="default")
    place.kubectl.create(json.dumps(pod))
    until(
        lambda: (
            place.status("p1")["members"]["total"] == 1
            and place.conditions("p1")["StoreReachable"]["reason"] == "StoreUnreachable"
        ),
        "the member is counted and the store was tried",
    )
    looked_again(place.health["controller"], 15)
    before = api_writes(place.kubectl)
    looked_again(place.health["controller"], 80)
    assert api_writes(place.kubectl) == before
    place.kubectl.delete("pod", "member", "--grace-period=0", "--force")


def test_controller_that_is_killed_again_and_again_ends_with_the_right_status(place: Place) -> None:
    """5.3: SIGKILL at ten different moments, while the pool changes; nothing is told that did not happen."""
    until(lambda: place.status("p1")["members"]["total"] == 0, "no pod is left")
    time.sleep(1)
    before = {one["metadata"]["uid"] for one in place.kubectl.list("events")}
    for number in range(10):
        image = f"example.org/connector:{number}"
        place.kubectl.apply(pool("p1", connector={"image": image}))
        time.sleep(0.25 * number)
        place.end("controller", signal.SIGKILL)
        place.start("controller")
    until(lambda: place.status("p1").get("connectorImage") == image, "the last change")
    stored = place.kubectl.get("kvsharepool", "p1")
    assert stored["status"]["observedGeneration"] == stored["metadata"]["generation"]
    assert "finalizers" not in stored["metadata"]
    assert "annotations" not in stored["metadata"]
    told = [one["message"] for one in place.kubectl.list("events") if one["metadata"]["uid"] not in before]
    assert told == []  # no condition changed
    assert "Traceback" not in place.log("controller")


def test_webhook_that_is_killed_is_back_with_the_same_certificate(place: Place) -> None:
    """5.3: it keeps nothing but what is mounted and listed."""
    place.end("webhook-1", signal.SIGKILL)
    place.start("webhook-1")
    until(lambda: place.ready("webhook-1"), "it is ready again")
    pod = pod_p0()
    pod["metadata"].update(name="again", namespace="default")
    place.kubectl.create(json.dumps(pod))
    assert names.MEMBER in place.kubectl.get("pod", "again")["metadata"]["labels"]
