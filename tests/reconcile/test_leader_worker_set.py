"""The real LeaderWorkerSet controller with its own webhooks beside ours: a TP 2 x PP 2 group of stand-in commands.

No kubelet runs here, and none is needed: the controller makes a leader's StatefulSet, the API server's own controllers
make pods of it, and a leader that is stored brings its workers. Both projects have a webhook for pods; the API server
calls them in the order of their configurations' names, so both orders are played.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest
import yaml

from kvshare_operator.api import crd, names
from kvshare_operator.core import certificates
from operator_processes import OperatorProcesses, until
from pods import Json, pool_p1
from testbed.cluster import Cluster, api_server
from testbed.control_plane import start_controller_manager
from testbed.kubectl import KubectlError
from testbed.ports import free_ports
from testbed.prepare.go_programs import GROUP_BUILDS
from testbed.process import Process

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(400)]
FILES = GROUP_BUILDS[0].folder
LWS = "leaderworkerset.sigs.k8s.io"
SERVE = "ray start --head && vllm serve org/m --tensor-parallel-size 2 --pipeline-parallel-size 2 $KVSHARE_VLLM_ARGS"
JOIN = "bash /vllm-workspace/examples/online_serving/multi-node-serving.sh worker --ray_address=$(LWS_LEADER_ADDRESS)"


class Place(OperatorProcesses):
    """An API server with the controller manager, the LeaderWorkerSet controller and ours."""

    def __init__(self, api: Cluster, folder: pathlib.Path) -> None:
        super().__init__(api.kubeconfig, folder, sweep_seconds=2, drain_seconds=1)
        self.api, self.kubectl = api, api.kubectl
        self.port, self.probe, manager = free_ports(3)
        start_controller_manager(api.programs, manager, api.kubeconfig)
        self.authority = ""

    def start_groups(self) -> Process:
        """Start the LeaderWorkerSet controller; its webhooks serve on loopback with a certificate of their own."""
        renewal = certificates.renewed(None, ("localhost",), datetime.datetime.now(datetime.UTC))
        assert renewal is not None
        folder = self.folder / "lws"
        folder.mkdir()
        (folder / "tls.crt").write_text(renewal[0].certificate)
        (folder / "tls.key").write_text(renewal[0].key)
        self.authority = renewal[0].bundle
        settings = {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "internalCertManagement": {"enable": False},
            "leaderElection": {"leaderElect": False},
            "webhook": {"host": "127.0.0.1", "port": self.port, "certDir": str(folder)},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self.probe}"},
        }
        (folder / "config.yaml").write_text(json.dumps(settings))
        command: list[str | pathlib.Path] = [
            FILES / "lws-manager",
            f"--config={folder / 'config.yaml'}",
            "--metrics-bind-address=0",
        ]
        environment = {**os.environ, "KUBECONFIG": str(self.api.kubeconfig)}
        return Process("lws-manager", command, log=self.folder / "lws.log", environment=environment)

    def register_groups(self, prefix: str) -> None:
        """Register the controller's webhooks as its authors do, under names that begin with ``prefix``."""
        for thing in self.kubectl.list("mutatingwebhookconfigurations"):
            if thing["metadata"]["name"] != "kvshare":
                self.kubectl.delete("mutatingwebhookconfiguration", thing["metadata"]["name"])
        for thing in yaml.safe_load_all((FILES / "webhooks.yaml").read_text()):
            thing["metadata"]["name"] = f"{prefix}-{thing['metadata']['name']}"
            for hook in thing["webhooks"]:
                path = hook["clientConfig"].pop("service")["path"]
                bundle = base64.b64encode(self.authority.encode()).decode()
                hook["clientConfig"] = {"url": f"https://localhost:{self.port}{path}", "caBundle": bundle}
            self.kubectl.apply(thing)

    def pods(self, name: str) -> dict[str, Json]:
        """Pods of a LeaderWorkerSet by name."""
        found = self.kubectl.list("pods", f"{LWS}/name={name}")
        return {pod["metadata"]["name"]: pod for pod in found}


def our_configuration(port: int) -> Json:
    """As the chart has it, with its name: called again when another webhook has changed the pod."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    asked = "has(object.metadata.annotations) && 'kvshare.dev/pool' in object.metadata.annotations"
    hook = {
        "name": "inject.kvshare.dev", "admissionReviewVersions": ["v1"], "rules": [rule], "failurePolicy": "Fail",
        "clientConfig": {"url": f"https://localhost:{port}/inject"}, "sideEffects": "None",
        "reinvocationPolicy": "IfNeeded", "matchConditions": [{"name": "opted-in", "expression": asked}],
    }  # fmt: skip
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "kvshare"},
        "webhooks": [hook],
    }


def group(name: str, *, workers_opt_in: bool = True) -> Json:
    """A group of two pods: pipeline rank 0 leads, rank 1 joins through Ray."""

    def template(script: str, annotated: bool) -> Json:
        container = {"name": "vllm", "image": "example.org/vllm:1", "command": ["sh", "-c"], "args": [script]}
        metadata = {"annotations": {names.POOL: "p1"}} if annotated else {}
        return {"metadata": metadata, "spec": {"containers": [container]}}

    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": 2,
                "leaderTemplate": template(SERVE, True),
                "workerTemplate": template(JOIN, workers_opt_in),
            },
        },
    }


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """Everything runs; pool p1 takes pipelines of two stages and denies whatever it cannot inject."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as api,
    ):
        made = Place(api, pathlib.Path(folder))
        groups = None
        try:
            api.kubectl.apply((FILES / "leaderworkersets.yaml").read_text())
            api.kubectl.apply(our_configuration(made.admission_ports["webhook"]), crd.manifest())
            for name in ("leaderworkersets.leaderworkerset.x-k8s.io", "kvsharepools.kvshare.dev"):
                api.kubectl.run("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")
            made.start_all(api.kubectl)
            groups = made.start_groups()
            pool = pool_p1(pipelineParallelSizes=[2], onConflict="Reject")
            pool["metadata"] = {"name": "p1", "namespace": "default"}
            api.kubectl.apply(pool)
            until(lambda: bool(api.kubectl.get("kvsharepool", "p1").get("status")), "the pool is looked at")
            until(lambda: bool(api.kubectl.list("serviceaccounts")), "the namespace has its account")
            until(lambda: injects(made), "a pod is injected")
            yield made
        finally:
            if groups is not None:
                groups.stop()
            made.end_all()


@pytest.mark.parametrize("prefix", ["a-lws", "lws"], ids=["theirs is called first", "ours is called first"])
def test_leader_is_injected_and_workers_are_recorded(place: Place, prefix: str) -> None:
    """B28 on the real controller: flags on the leader only, code on both, nothing refused, a complete group."""
    place.register_groups(prefix)
    name = f"tp2-pp2-{prefix}"
    until(lambda: applied(place, group(name)), "the set is taken")
    leader, worker = f"{name}-0", f"{name}-0-1"
    until(lambda: {leader, worker} <= place.pods(name).keys(), "leader and worker are there", 180)
    pods = place.pods(name)
    records = {pod: json.loads(made["metadata"]["annotations"][names.INJECTED]) for pod, made in pods.items()}
    assert (records[leader]["storeTP"], records[leader]["localTP"], records[leader]["role"]) == (4, 2, "both")
    assert records[worker]["role"] == "worker"
    assert {pod: made["metadata"]["labels"][f"{LWS}/worker-index"] for pod, made in pods.items()} == {
        leader: "0", worker: "1",
    }  # fmt: skip
    variables = {
        pod: {one["name"]: one.get("value", "") for one in made["spec"]["containers"][0]["env"]}
        for pod, made in pods.items()
    }
    assert "kv_connector=KVShareConnector" in variables[leader][names.ARGS_VARIABLE]
    assert names.ARGS_VARIABLE not in variables[worker]
    for pod, found in variables.items():
        assert found["PYTHONPATH"] == names.PAYLOAD_PATH, pod
        assert "LWS_LEADER_ADDRESS" in found, pod
    assert pods[worker]["spec"]["containers"][0]["args"] == [JOIN]

    def members() -> Json:
        status: Json = place.kubectl.get("kvsharepool", "p1")["status"]
        return status

    until(lambda: members()["members"]["unreported"] == 1, "the leader is waited for, the worker is not")
    # A leader that is seen a moment before its worker has an incomplete group for so long.
    until(lambda: "GroupIncomplete" not in json.dumps(members()), "the group is complete")
    place.kubectl.delete("leaderworkerset", name)
    place.kubectl.run("delete", "statefulsets,pods", f"--selector={LWS}/name={name}", "--grace-period=0", "--force")


def test_group_whose_workers_did_not_opt_in_is_named(place: Place) -> None:
    """The whole group is restarted by one command, which selects by the controller's own label."""
    place.register_groups("lws")
    until(lambda: applied(place, group("partly", workers_opt_in=False)), "the set is taken")
    until(lambda: len(place.pods("partly")) == 2, "leader and worker are there", 180)

    def problems() -> list[Json]:
        status: Json = place.kubectl.get("kvsharepool", "p1")["status"]
        return [one for one in status.get("problems", []) if one["reason"] == "GroupIncomplete"]

    until(lambda: bool(problems()), "the group is named")
    (problem,) = problems()
    assert problem["owner"] == "leaderworkerset/partly"
    assert f"kubectl -n default delete pods -l {LWS}/name=partly" in problem["message"]


def injects(place: Place) -> bool:
    """Whether a pod that opts in is taken, in a dry run.

    A StatefulSet's pod that is refused because the API server does not know our CA yet, or the webhook not the pool, is
    tried again after pauses that double.
    """
    container = {"name": "vllm", "image": "example.org/vllm:1", "command": ["sh", "-c"], "args": [SERVE]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "first", "annotations": {names.POOL: "p1"}},
        "spec": {"containers": [container]},
    }
    try:
        text = place.kubectl.run("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod))
    except KubectlError:
        return False
    return names.INJECTED in json.loads(text)["metadata"]["annotations"]


def applied(place: Place, thing: Json) -> bool:
    """Whether an object is taken; the webhooks of a controller that has just started are not there at once."""
    try:
        place.kubectl.apply(thing)
    except KubectlError:
        return False
    return True
