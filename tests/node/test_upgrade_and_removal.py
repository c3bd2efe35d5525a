"""A release's life on the one-node cluster: from the first chart to this one, back, on, a namespace that goes, out.

Both charts run this checkout's operator. Members are pods that no node starts. Each test goes on where the one before
stopped.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare_operator.api import names
from pods import pod_p0, pool_p1
from testbed import places
from testbed.cluster import cluster
from testbed.demo import product
from testbed.demo.place import OwnCluster
from testbed.kubectl import Kubectl, KubectlError, Object

pytestmark = pytest.mark.scenario
SYSTEM, TEAM, GONE = product.NAMESPACE, "team", "gone"
FIRST = places.REPOSITORY / "tests" / "chart" / "testdata" / "first-cut" / "kvshare-0.1.0.tgz"
OFTEN = {"controller.sweepSeconds": "10", "controller.fullPassSeconds": "10"}
#: What a namespace has of its own, and what goes by itself.
NOBODYS = {"events", "events.events.k8s.io", "endpoints", "endpointslices.discovery.k8s.io"}


class Place:
    """The cluster with the release, and a namespace with a pool."""

    def __init__(self, on: OwnCluster) -> None:
        self.on, self.kubectl = on, on.kubectl
        self.team: Kubectl = on.kubectl.within(TEAM)
        self.system: Kubectl = on.kubectl.within(SYSTEM)
        self.pods = 0

    def namespace(self, name: str) -> Kubectl:
        """Make a namespace."""
        self.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        return self.kubectl.within(name)

    def injected(self, where: str = TEAM) -> bool:
        """Create a pod that opts in; whether it was injected."""
        self.pods += 1
        pod = pod_p0()
        pod["spec"]["nodeSelector"] = {"kvshare.test/none": "x"}
        pod["metadata"] = {**pod["metadata"], "name": f"member-{self.pods}", "namespace": where}
        self.kubectl.within(where).create(json.dumps(pod))
        stored = self.kubectl.within(where).get("pod", f"member-{self.pods}")
        record = json.loads(stored["metadata"]["annotations"].get(names.INJECTED, "{}"))
        return bool(record) and any("kvshare" in one["name"] for one in stored["spec"].get("initContainers", []))

    def pool(self) -> Object:
        """The pool's identity, wishes and outcome."""
        found = self.team.get("kvsharepool", "p1")
        return {
            "uid": found["metadata"]["uid"], "sizes": found["spec"]["prefill"]["tensorParallelSizes"],
            "store": found["status"]["storeTPSize"], "namespace": found["status"]["cacheNamespace"],
        }  # fmt: skip

    def wait(self, what: str, true: object, seconds: float = 90) -> None:
        """Wait, and tell the operator's state when it does not come true."""
        assert callable(true)
        self.system.wait_for(what, true, seconds=seconds, about=self.system.what_happens)

    def all_injected_while(self, change: object) -> int:
        """Create pods that opt in while something changes; how many, all of which must have been injected."""
        assert callable(change)
        over = threading.Event()
        lost: list[int] = []

        def create() -> None:
            while not over.is_set():
                if not self.injected():
                    lost.append(self.pods)
                over.wait(0.2)

        creating = threading.Thread(target=create)
        before = self.pods
        creating.start()
        try:
            change()
        finally:
            over.set()
            creating.join()
        assert lost == []
        return self.pods - before

    def left(self, where: str) -> set[str]:
        """Everything that a namespace holds besides what each one has, as `kind/name`."""
        kinds = self.kubectl.run("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
        found = {
            f"{kind}/{thing['metadata']['name']}"
            for kind in kinds
            if kind not in NOBODYS
            for thing in self.kubectl.within(where).list(kind)
        }
        return found - {"configmaps/kube-root-ca.crt", "serviceaccounts/default"}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The first chart, and a pool that it has looked at."""
    with cluster(places.CACHE / "cluster" / "upgrade-tests", images=OwnCluster.archives()) as running:
        made = Place(OwnCluster(running))
        product.install(made.on, OFTEN, chart=Path(FIRST))
        pool = pool_p1()
        pool["metadata"] = {"name": "p1", "namespace": TEAM}
        made.namespace(TEAM).apply(pool)
        made.wait("the pool is looked at", lambda: made.team.get("kvsharepool", "p1").get("status", {}) != {})
        made.wait("it has a size", lambda: made.pool()["store"] == 4)
        yield made


def test_upgrade_under_creations_loses_no_pod_and_no_pool(place: Place) -> None:
    """From the first chart to this one: every pod that is created meanwhile is injected."""
    before = place.pool()
    assert place.injected()
    assert place.all_injected_while(lambda: product.install(place.on, OFTEN)) > 5
    assert place.pool() == before


def test_rollback_under_creations_loses_no_pod_and_no_pool(place: Place) -> None:
    """Back to the first chart and once more to this one."""
    before = place.pool()
    assert place.all_injected_while(lambda: product.roll_back(place.kubectl)) > 5
    assert place.all_injected_while(lambda: product.install(place.on, OFTEN)) > 5
    assert place.pool() == before


def test_deleted_namespace_goes_with_its_pools_and_stores_and_disturbs_nobody(place: Place) -> None:
    """A managed store, its pool and a member: nothing holds the namespace, and the controller goes on."""
    there = place.namespace(GONE)
    managed = pool_p1(
        store={"type": "Managed", "managed": {"capacityPerNode": "256Mi", "image": place.on.engine_image}}
    )
    managed["metadata"] = {"name": "own", "namespace": GONE}
    member = pool_p1()
    member["metadata"] = {"name": "p1", "namespace": GONE}
    there.apply(managed, member)
    place.wait("the store is made", lambda: len(there.list("statefulsets")) == 1)
    place.wait("the pool is looked at", lambda: "storeTPSize" in there.get("kvsharepool", "p1").get("status", {}))
    assert place.injected(GONE)
    controllers = {one["metadata"]["uid"] for one in place.system.list("pods")}
    there.run("delete", "namespace", GONE, "--wait=false")

    def gone() -> bool:
        try:
            place.kubectl.get("namespace", GONE)
        except KubectlError as error:
            return "NotFound" in str(error)
        return False

    place.wait("the namespace is gone", gone)
    members = place.team.get("kvsharepool", "p1")["status"]["members"]["total"]
    assert place.injected()
    place.wait(
        "the other pool is looked at",
        lambda: place.team.get("kvsharepool", "p1")["status"]["members"]["total"] == members + 1,
    )
    after = place.system.list("pods")
    assert {one["metadata"]["uid"] for one in after} == controllers
    assert all(state["restartCount"] == 0 for one in after for state in one["status"]["containerStatuses"])
    assert "Traceback" not in place.system.run("logs", "deployment/kvshare-controller")


def test_namespace_of_the_same_name_starts_anew(place: Place) -> None:
    """Nothing is remembered of the one before."""
    there = place.namespace(GONE)
    pool = pool_p1()
    pool["metadata"] = {"name": "p1", "namespace": GONE}
    there.apply(pool)
    place.wait("the pool is looked at", lambda: "storeTPSize" in there.get("kvsharepool", "p1").get("status", {}))
    assert there.get("kvsharepool", "p1")["status"]["members"]["total"] == 0
    assert place.injected(GONE)


def test_uninstalled_chart_leaves_pools_and_members_alone_and_nothing_else(place: Place) -> None:
    """`crds.keep`: the resource and its pools stay, pods start as if there had been no operator."""
    before, pods = place.pool(), {one["metadata"]["name"] for one in place.team.list("pods")}
    product.uninstall(place.kubectl)
    place.wait("the operator is gone", lambda: place.system.list("pods") == [])
    assert place.left(SYSTEM) == set()
    assert place.pool() == before
    assert {one["metadata"]["name"] for one in place.team.list("pods")} == pods
    names_left = place.kubectl.run(
        "get", "clusterroles,clusterrolebindings,mutatingwebhookconfigurations", "--output=name"
    )
    assert "kvshare" not in names_left
    assert not place.injected()
    place.team.get("pod", f"member-{place.pods}")


def test_chart_that_comes_back_takes_the_pools_up_again(place: Place) -> None:
    """The same store, the same cache; the pod that came meanwhile is named with its owner's command."""
    before = place.pool()
    product.install(place.on, OFTEN)
    assert place.injected()
    assert place.pool() == before
