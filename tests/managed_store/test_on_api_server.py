"""Managed stores on a real kube-apiserver with the real controllers of Kubernetes, by the controller as it is shipped.

It runs with the permissions of the chart and nothing more. No kubelet: pods are made and never start.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvshare_operator.api import crd, names
from kvshare_operator.core.store.objects import store_objects
from managed_pools import CASES, plan, pool
from operator_processes import ROOT, api_writes, looked_again, metric, operator_environment, until
from pods import Json
from testbed.cluster import Cluster, api_server
from testbed.kubectl import Kubectl, KubectlError
from testbed.ports import free_ports
from testbed.prepare.go_programs import program
from testbed.process import Process

pytestmark = pytest.mark.apiserver
SYSTEM = "kvshare-system"
KINDS = "deployments,statefulsets,services,poddisruptionbudgets,networkpolicies"
STORE = f"{names.STORE}=p1"


class Running:
    """An API server, Kubernetes' controller manager, and our controller."""

    def __init__(self, api: Cluster, folder: pathlib.Path) -> None:
        self.api, self.folder = api, folder
        self.kubectl = api.kubectl.within("team")
        self.health, self.manager_port = free_ports(2)
        self.started: list[Process] = []

    def start_manager(self) -> None:
        """The controllers that make pods and collect garbage."""
        state = self.api.state
        self._start(
            "kube-controller-manager",
            program("kube-controller-manager"),
            f"--kubeconfig={self.api.kubeconfig}",
            "--leader-elect=false",
            "--use-service-account-credentials",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.manager_port}",
            f"--service-account-private-key-file={state / 'service-accounts.key'}",
            f"--root-ca-file={state / 'certificates' / 'apiserver.crt'}",
        )

    def start_controller(self) -> None:
        """Our controller, as the chart's service account."""
        rendered = subprocess.run(
            [str(program("helm")), "template", "kvshare", str(ROOT / "charts" / "kvshare"), "--namespace", SYSTEM],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        wanted = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
        for thing in yaml.safe_load_all(rendered.stdout):
            if thing and thing["kind"] in wanted:
                self.api.kubectl.within(thing["metadata"].get("namespace", "default")).apply(thing)
        token = self.api.kubectl.within(SYSTEM).run("create", "token", "kvshare-controller").strip()
        config = json.loads(self.api.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        kubeconfig = self.folder / "controller.kubeconfig"
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(json.dumps(config))
        environment = operator_environment(
            kubeconfig, self.health, namespace=SYSTEM, store_image="example.org/mooncake:1"
        )
        self._start("controller", sys.executable, "-m", "kvshare_operator", "controller", environment=environment)

    def _start(self, name: str, *command: str | pathlib.Path, environment: Any = None) -> None:
        log = self.folder / f"{name}.log"
        self.started.append(Process(name, command, log=log, environment=environment))

    def stop(self) -> None:
        """End what was started."""
        for process in self.started:
            process.stop()

    def objects(self) -> dict[tuple[str, str], Json]:
        """Everything of the store of p1, by kind and name."""
        return {(one["kind"], one["metadata"]["name"]): one for one in self.kubectl.list(KINDS, STORE)}

    def pods(self) -> set[str]:
        """Names of the store's pods that are not being deleted."""
        return {
            one["metadata"]["name"]
            for one in self.kubectl.list("pods", STORE)
            if "deletionTimestamp" not in one["metadata"]
        }

    def condition(self, name: str, kind: str = names.STORE_REACHABLE) -> Json:
        """One condition of a pool."""
        conditions = self.kubectl.get("kvsharepool", name).get("status", {}).get("conditions", [])
        found: Json = next((one for one in conditions if one["type"] == kind), {})
        return found

    def writes(self) -> float:
        """How many store objects the controller has written in its life."""
        return metric(self.health, "kvshare_operator_store_writes_total")


def named(name: str, **managed: Any) -> Json:
    """A pool with a managed store in the namespace `team`."""
    made = pool(managed)
    made["metadata"] = {"name": name, "namespace": "team"}
    return made


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Everything serves, in namespaces that enforce the restricted standard; pool p1 exists."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as api,
    ):
        place = Running(api, pathlib.Path(folder))
        try:
            level = {"pod-security.kubernetes.io/enforce": "restricted"}
            for name in (SYSTEM, "team"):
                api.kubectl.apply(
                    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": level}}
                )
            api.kubectl.apply(crd.manifest())
            api.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
            place.start_manager()
            place.start_controller()
            place.kubectl.apply(named("p1"))
            until(lambda: len(place.objects()) == 7, "the store is made")
            yield place
        finally:
            place.stop()


def test_pods_are_made_in_a_restricted_namespace(running: Running) -> None:
    """One master and both nodes at once; without a kubelet the store is starting, and the status says so."""
    until(lambda: len(running.pods()) == 3, "three pods")
    assert {"kvs-p1-nodes-0", "kvs-p1-nodes-1"} < running.pods()
    until(lambda: running.condition("p1").get("reason") == "StoreStarting", "the status tells")
    assert running.condition("p1", names.ACCEPTED)["status"] == "True"


def test_steady_state_writes_nothing(running: Running) -> None:
    """B61: many passes, not one write by the API server's own count, though it added its defaults.

    Kubernetes' own controllers update (PUT) meanwhile; nobody but ours applies.
    """
    until(lambda: running.condition("p1").get("reason") == "StoreStarting", "it is steady")
    looked_again(running.health, 2)
    before, ours = running.writes(), api_writes(running.kubectl, {"APPLY", "PATCH"})
    versions = {key: one["metadata"]["generation"] for key, one in running.objects().items() if key[0] != "Service"}
    looked_again(running.health, 12)
    assert api_writes(running.kubectl, {"APPLY", "PATCH"}) == ours
    after = {key: one["metadata"]["generation"] for key, one in running.objects().items() if key[0] != "Service"}
    assert running.writes() == before
    assert versions == after


def test_edit_by_hand_is_put_back(running: Running) -> None:
    """Replicas, a flag, a selector of a Service, a rule of a policy, a whole object."""
    edits = {
        "statefulset/kvs-p1-nodes": {"spec": {"replicas": 0}},
        "service/kvs-p1-master": {"spec": {"selector": {"kvshare.dev/store": "other"}}},
        "networkpolicy/kvs-p1-master": {"spec": {"ingress": [{}]}},
        "poddisruptionbudget/kvs-p1-nodes": {"spec": {"maxUnavailable": 100}},
    }
    before = running.objects()
    for name, change in edits.items():
        running.kubectl.run("patch", name, "--type=merge", "-p", json.dumps(change))
    running.kubectl.delete("service", "kvs-p1-nodes")

    def mended() -> bool:
        now = running.objects()
        return now.keys() == before.keys() and all(
            now[key]["spec"] == before[key]["spec"] for key in before if key[0] != "Service"
        )

    until(mended, "all edits are undone")
    selector = running.kubectl.get("service", "kvs-p1-master")["spec"]["selector"]
    assert selector["kvshare.dev/store"] == "p1"


@pytest.mark.parametrize("count", [4, 1, 2])
def test_store_is_scaled_up_and_down(running: Running, count: int) -> None:
    """The master's pod stays the same."""
    (master,) = [name for name in running.pods() if "master" in name]
    running.kubectl.apply(named("p1", nodes=count))
    wanted = {master, *(f"kvs-p1-nodes-{number}" for number in range(count))}
    until(lambda: running.pods() == wanted, f"{count} node(s)")


def test_field_that_the_pool_no_longer_has_is_removed(running: Running) -> None:
    """Server-side apply takes back what we once said."""

    def chosen() -> Any:
        spec = running.kubectl.get("statefulset", "kvs-p1-nodes")["spec"]["template"]["spec"]
        return spec.get("nodeSelector")

    running.kubectl.apply(named("p1", nodeSelector={"pool": "kv"}))
    until(lambda: chosen() == {"pool": "kv"}, "the selector is there")
    running.kubectl.apply(named("p1"))
    until(lambda: chosen() is None, "the selector is gone")


def test_fields_are_owned_by_the_controller(running: Running) -> None:
    """One manager, by apply."""
    raw = running.kubectl.run("get", "statefulset", "kvs-p1-nodes", "-o", "json", "--show-managed-fields")
    managers = {(one["manager"], one["operation"]) for one in json.loads(raw)["metadata"]["managedFields"]}
    assert (names.CONTROLLER_MANAGER, "Apply") in managers
    assert (names.CONTROLLER_MANAGER, "Update") not in managers


def test_object_of_somebody_else_is_left_alone(running: Running) -> None:
    """The pool says which; it goes on when the name is free."""
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kvs-p2-master"},
        "spec": {"ports": [{"port": 1}], "selector": {"a": "b"}},
    }
    running.kubectl.apply(theirs)
    running.kubectl.apply(named("p2"))
    until(lambda: running.condition("p2").get("reason") == "StoreObjectForeign", "the status tells")
    assert running.kubectl.get("service", "kvs-p2-master")["spec"]["selector"] == {"a": "b"}
    running.kubectl.delete("service", "kvs-p2-master")
    until(lambda: running.condition("p2").get("reason") == "StoreStarting", "it goes on")
    running.kubectl.delete("kvsharepool", "p2")


def test_quota_is_named_in_the_status(running: Running) -> None:
    """What the API server refuses, in its own words."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-sets"},
        "spec": {"hard": {"count/statefulsets.apps": "1"}},
    }
    running.kubectl.apply(quota)
    until(lambda: bool(running.kubectl.get("resourcequota", "no-sets").get("status", {}).get("used")), "it counts")
    running.kubectl.apply(named("p3"))
    until(lambda: running.condition("p3").get("reason") == "StoreRefused", "the status tells")
    assert "exceeded quota" in running.condition("p3")["message"]
    running.kubectl.delete("resourcequota", "no-sets")
    until(lambda: running.condition("p3").get("reason") == "StoreStarting", "it goes on")
    running.kubectl.delete("kvsharepool", "p3")


def test_pods_that_a_quota_refuses_are_counted_in_the_status(running: Running) -> None:
    """The objects are there, their pods are not: the memory of the namespace is used up."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "memory"},
        "spec": {"hard": {"requests.memory": "1Gi"}},
    }
    running.kubectl.apply(quota)
    until(lambda: bool(running.kubectl.get("resourcequota", "memory").get("status", {}).get("used")), "it counts")
    running.kubectl.apply(named("p4"))
    until(lambda: "0 of 2 pods" in running.condition("p4").get("message", ""), "the status tells")
    assert running.condition("p4")["reason"] == "StoreStarting"
    running.kubectl.delete("resourcequota", "memory")
    running.kubectl.delete("kvsharepool", "p4")


@pytest.mark.parametrize("name", CASES)
def test_every_object_of_every_case_is_accepted(running: Running, name: str) -> None:
    """Also for a pool name of 63 characters; unknown fields would be refused."""
    made, settings = CASES[name]
    kubectl: Kubectl = running.api.kubectl
    for pool_name in ("p1", "9" * 63):
        changed = json.loads(json.dumps(made))
        changed["metadata"].update(name=pool_name, namespace="default")
        for thing in store_objects(plan(changed, settings)):
            text = json.dumps(thing)
            kubectl.run("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)


def test_store_goes_with_its_pool_and_nothing_waits_for_us(running: Running) -> None:
    """No finalizer: the pool is gone at once, its store soon after, by Kubernetes' own garbage collector."""
    began = time.monotonic()
    running.kubectl.delete("kvsharepool", "p1")
    assert time.monotonic() - began < 60
    until(lambda: not running.objects() and not running.pods(), "everything is gone", seconds=60)
    log = (running.folder / "controller.log").read_text()
    assert "Traceback" not in log, log
    with contextlib.suppress(KubectlError):
        assert not running.kubectl.get("kvsharepool", "p1")
