"""Section F of the operator's cases on the one-node cluster: rollouts, rotation, faults of ours, odd users, scripts.

No engine runs here: pods either need not start, or run a stub that prints the arguments it got. All tests share
one cluster, in which a policy gives the operator's pods an arbitrary user id, as OpenShift does.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import httpx
import pytest

from kvshare_operator.api import names
from kvshare_operator.core import certificates
from pods import annotated, pod_p0, pool_p1, script_pod
from testbed import places
from testbed.cluster import cluster
from testbed.demo import product
from testbed.demo.place import OwnCluster
from testbed.kubectl import Kubectl, Object
from testbed.rest import api_client

pytestmark = pytest.mark.scenario
NAMESPACE = "faults"
ARBITRARY_USER = 1000650000
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SYSTEM = product.NAMESPACE
WEBHOOK = "deployment/kvshare-webhook"
SECRET = "kvshare-webhook-certificates"
STUB = "#!/usr/bin/python3\nimport json, sys\nprint('ARGV ' + json.dumps(sys.argv[1:]), flush=True)\n"


class Place:
    """The cluster with the product and pool p1, whose store nobody runs."""

    def __init__(self, on: OwnCluster, client: httpx.Client) -> None:
        self.on, self.client = on, client
        self.kubectl: Kubectl = on.kubectl.within(NAMESPACE)
        self.system: Kubectl = on.kubectl.within(SYSTEM)

    def create(self, pod: Object, *, dry: bool = False) -> tuple[Object, str]:
        """Create a pod that need not be scheduled; return it as stored, and the API server's warnings."""
        pod["metadata"] = {**pod["metadata"], "namespace": NAMESPACE}
        pod["metadata"].setdefault("name", f"p-{uuid.uuid4().hex[:10]}")
        answer = self.client.post(PODS, json=pod, params={"dryRun": "All"} if dry else {})
        assert answer.status_code == 201, answer.text
        return answer.json(), answer.headers.get("Warning", "")

    def pool(self) -> Object:
        """The pool as it is now."""
        return self.kubectl.get("kvsharepool", "p1")

    def problems(self) -> dict[str, str]:
        """Reason by owner, from the pool's status."""
        return {one["owner"]: one["reason"] for one in self.pool()["status"].get("problems", [])}

    def remove_pods(self) -> None:
        """Delete all pods of the namespace."""
        self.kubectl.run("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=true")

    def wait(self, what: str, true: Callable[[], bool], seconds: float = 120) -> None:
        """Wait, and tell the operator's state when it does not come true."""
        self.system.wait_for(what, true, seconds=seconds, about=self.system.what_happens)

    def roll(self, *words: str) -> None:
        """Change the webhook's Deployment and wait until only new pods are left."""
        self.system.run(*words)
        self.system.run("rollout", "status", WEBHOOK, "--timeout=120s", timeout=130)
        self.wait("the old pods are gone", lambda: self.running("webhook") == 2)

    def running(self, component: str) -> int:
        """How many pods of a part of the operator there are, stopping ones as well."""
        return len(self.system.list("pods", f"app.kubernetes.io/component={component}"))


def waiting(pod: Object) -> Object:
    """The same pod, for a node that does not exist: it is stored, and nobody starts it."""
    pod["spec"]["nodeSelector"] = {"kvshare.test/none": "x"}
    pod["metadata"] = {"annotations": pod["metadata"]["annotations"]}
    return pod


def record(pod: Object) -> Object:
    """The record annotation of a stored pod; empty without one."""
    found: Object = json.loads(pod["metadata"]["annotations"].get(names.INJECTED, "{}"))
    return found


def namespace(name: str) -> Object:
    """A namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def arbitrary_user() -> list[Object]:
    """A policy that sets the user id of every pod in the operator's namespace, as OpenShift's admission does."""
    patch = f'JSONPatch{{op: "add", path: "/spec/securityContext/runAsUser", value: {ARBITRARY_USER}}}'
    api = "admissionregistration.k8s.io/v1"
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    selector = {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}}
    policy = {
        "apiVersion": api,
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": "arbitrary-user"},
        "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {"namespaceSelector": selector, "resourceRules": rules},
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{patch}]"}}],
        },
    }
    binding = {
        "apiVersion": api,
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": "arbitrary-user"},
        "spec": {"policyName": "arbitrary-user"},
    }
    return [policy, binding]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The product runs under an arbitrary user id; pool p1 has been looked at."""
    archives = OwnCluster.archives()
    with (
        cluster(places.CACHE / "cluster" / "fault-tests", images=archives) as running,
        api_client(running.kubeconfig) as client,
    ):
        made = Place(OwnCluster(running), client)
        running.kubectl.apply(*arbitrary_user(), *(namespace(name) for name in (SYSTEM, NAMESPACE)))
        time.sleep(2)  # the API server learns of a policy a moment later
        values = {"controller.sweepSeconds": "10", "controller.fullPassSeconds": "10"}
        product.install(made.on, values)
        pool = pool_p1()
        pool["metadata"] = {"name": "p1", "namespace": NAMESPACE}
        made.kubectl.apply(pool)
        made.wait("the pool is looked at", lambda: made.pool().get("status", {}).get("storeTPSize") == 4)
        yield made


def test_operator_runs_under_an_arbitrary_user_in_a_restricted_namespace(place: Place) -> None:
    """F5: user 1000650000, which no image knows; controller and both webhooks are ready and do their work."""
    pods = place.system.list("pods")
    assert {pod["spec"]["securityContext"]["runAsUser"] for pod in pods} == {ARBITRARY_USER}
    assert all(one["ready"] for pod in pods for one in pod["status"]["containerStatuses"])
    assert record(place.create(waiting(pod_p0()), dry=True)[0])["storeTP"] == 4


def test_pools_resource_version_stands_still_for_a_minute(place: Place) -> None:
    """F1: controller and two webhooks, with a member there and a store that does not answer."""
    place.create(waiting(pod_p0()))
    place.wait("the member is counted", lambda: place.pool()["status"]["members"]["total"] == 1)
    place.wait("the store was tried", lambda: "StoreUnreachable" in json.dumps(place.pool()["status"]))
    before = place.pool()["metadata"]["resourceVersion"]
    time.sleep(60)
    assert place.pool()["metadata"]["resourceVersion"] == before
    place.remove_pods()


def test_no_pod_is_lost_while_the_webhook_is_restarted(place: Place) -> None:
    """F3, B56: twenty pods a second during a rolling restart, and every one has a record."""
    missed: list[str] = []
    made = 0
    stop = threading.Event()

    def load() -> None:
        nonlocal made
        pause = time.monotonic()
        while not stop.is_set():
            pod, warnings = place.create(waiting(pod_p0()))
            made += 1
            if not record(pod):
                missed.append(f"{pod['metadata']['name']} {warnings}")
            pause += 0.05
            time.sleep(max(0.0, pause - time.monotonic()))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        time.sleep(1)
        place.roll("rollout", "restart", WEBHOOK)
        time.sleep(2)
    finally:
        stop.set()
        thread.join()
    place.remove_pods()
    assert made > 100
    assert missed == []


SCRIPTS = {
    "llm-d": (
        'export HF_HOME=/tmp\nif [ -n "$HOME" ]; then cd /tmp; fi\n'
        "exec vllm serve org/m \\\n  --tensor-parallel-size 2 \\\n  --port 8000 \\\n  $KVSHARE_VLLM_ARGS\n"
    ),
    "kserve": 'eval "vllm serve org/m --tensor-parallel-size 2 ${VLLM_ADDITIONAL_ARGS} $@"',
    "lws-leader": "(sleep 0) & vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS; wait",
    "here-document": "cat > /tmp/x <<EOF\n# it's $HOME\nEOF\nvllm serve org/m -tp 2 ${KVSHARE_VLLM_ARGS}",
    "production-stack": None,
}


def stub_pod(name: str, script: str | None) -> Object:
    """A pod with a stub `vllm` first on PATH, started by a script, or by a plain list."""
    fields: Object = {
        "image": "",
        "imagePullPolicy": "Never",
        "resources": {},
        "env": [
            {"name": "PATH", "value": "/stub:/usr/local/bin:/usr/bin:/bin"},
            {"name": "VLLM_ADDITIONAL_ARGS", "value": "--enforce-eager"},
        ],
        "volumeMounts": [{"name": "stub", "mountPath": "/stub"}],
    }
    plain = {"command": ["vllm", "serve", "org/m"], "args": ["--tensor-parallel-size", "2", "--port", "8000"]}
    pod = script_pod(script, **fields) if script else pod_p0(**fields, **plain)
    pod["spec"]["volumes"] = [{"name": "stub", "configMap": {"name": "stub", "defaultMode": 0o555}}]
    pod["spec"]["restartPolicy"] = "Never"
    pod["metadata"]["name"] = name
    return pod


def test_scripts_of_real_charts_hand_the_flags_on_in_real_containers(place: Place) -> None:
    """F6, B11, B26: what a stub `vllm` is given in a container, by five ways to start it, are the intended flags."""
    stub = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "stub"}, "data": {"vllm": STUB}}
    place.kubectl.apply(stub)
    for name, script in SCRIPTS.items():
        pod = stub_pod(name, script)
        pod["spec"]["containers"][0]["image"] = place.on.engine_image
        assert record(place.create(pod)[0])["localTP"] == 2
    for name in SCRIPTS:
        place.kubectl.run("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "--timeout=120s")
    given = {name: json.loads(place.kubectl.run("logs", name).partition("ARGV ")[2]) for name in SCRIPTS}
    flags = [word for word in given["production-stack"] if word.startswith("--kv-transfer-config.")]
    assert "--kv-transfer-config.kv_connector_extra_config.store_tp_size=4" in flags
    for name, words in given.items():
        assert words[:2] == ["serve", "org/m"], name
        assert [word for word in words if word.startswith("--kv-transfer-config.")] == flags, name
        assert "--block-size=16" in words
    assert "--enforce-eager" in given["kserve"]


def test_copied_pod_is_evaluated_anew(place: Place) -> None:
    """F7: YAML of a pod that ran, applied again under another name, and once more with another size."""
    stored = place.kubectl.get("pod", "production-stack")
    first = record(stored)
    copied = {"apiVersion": "v1", "kind": "Pod", "spec": stored["spec"]}
    del copied["spec"]["nodeName"]
    kept = {key: stored["metadata"][key] for key in ("annotations", "labels")}
    kept["annotations"][names.INJECTED] = '{"pool":"p1","reason":"TPNotInPool"}'
    again, _ = place.create(waiting_copy({**copied, "metadata": {**kept, "name": "again"}}))
    assert record(again) == first
    changed = json.loads(json.dumps(copied).replace('"--tensor-parallel-size", "2"', '"--tensor-parallel-size", "4"'))
    assert record(place.create(waiting_copy({**changed, "metadata": {**kept, "name": "four"}}))[0])["localTP"] == 4
    place.remove_pods()


def waiting_copy(pod: Object) -> Object:
    """A copied pod that nobody starts."""
    return {**pod, "spec": {**pod["spec"], "nodeSelector": {"kvshare.test/none": "x"}}}


def test_fault_of_ours_costs_a_warning_and_no_pod(place: Place) -> None:
    """F2: every review raises inside the webhook; the pod is created as it was, and the warning says so."""
    place.roll("set", "env", WEBHOOK, "KVSHARE_FAULT=Review")
    pod, warnings = place.create(waiting(pod_p0()))
    assert record(pod) == {}
    assert "InternalError" in warnings
    place.roll("set", "env", WEBHOOK, "KVSHARE_FAULT-")
    assert record(place.create(waiting(pod_p0()), dry=True)[0])["storeTP"] == 4
    place.remove_pods()


def test_pod_that_started_without_any_webhook_is_named_with_its_owner_until_it_is_restarted(place: Place) -> None:
    """F10, B53: zero replicas, then back; the named command is what clears it."""
    place.system.run("scale", WEBHOOK, "--replicas=0")
    place.wait("no webhook is left", lambda: place.running("webhook") == 0)
    pod = waiting(annotated(pod_p0(), role="prefill"))
    template = {"metadata": {**pod["metadata"], "labels": {"app": "missed"}}, "spec": pod["spec"]}
    place.kubectl.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "missed"},
            "spec": {
                "strategy": {"type": "Recreate"},  # its pods never become ready, so nothing may wait for that
                "selector": {"matchLabels": {"app": "missed"}},
                "template": template,
            },
        }
    )
    place.wait("its pod exists", lambda: bool(place.kubectl.list("pods", "app=missed")))
    place.roll("scale", WEBHOOK, "--replicas=2")
    place.wait("it is named", lambda: place.problems() == {"deployment/missed": "NotInjected"})
    (condition,) = [one for one in place.pool()["status"]["conditions"] if one["type"] == names.MEMBERS_CONSISTENT]
    assert (condition["status"], condition["reason"]) == ("False", "NotInjected")
    command = condition["message"].split("kubectl ", 1)[1].split()
    place.kubectl.run(*command)
    place.wait("it is forgotten", lambda: place.problems() == {})
    assert record(place.kubectl.pod("app=missed"))["role"] == "prefill"


@contextlib.contextmanager
def reviewed_all_the_time(place: Place) -> Iterator[list[str]]:
    """Dry-run pods, ten a second; collects those that came back without a record."""
    missed: list[str] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            pod, warnings = place.create(waiting(pod_p0()), dry=True)
            if not record(pod):
                missed.append(warnings or "no record")
            time.sleep(0.1)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield missed
    finally:
        stop.set()
        thread.join()


def test_certificates_change_under_load_and_a_mismatched_pair_is_not_served(place: Place) -> None:
    """F4, B49, B50: a pair that does not fit reaches both webhooks, then the controller's new one; none is refused."""

    def log(pod: Object) -> str:
        return place.system.run("logs", pod["metadata"]["name"])

    webhooks = place.system.list("pods", "app.kubernetes.io/component=webhook")
    with reviewed_all_the_time(place) as missed:
        place.system.run("scale", "deployment/kvshare-controller", "--replicas=0")
        place.wait("no controller is left", lambda: place.running("controller") == 0)
        other = certificates.renewed(None, ["x"], datetime.datetime.now(datetime.UTC))
        assert other is not None
        wrong = json.dumps({"data": {"tls.key": base64.b64encode(other[0].key.encode()).decode()}})
        place.system.run("patch", "secret", SECRET, "--type=merge", f"--patch={wrong}")
        place.wait(
            "both webhooks were given the wrong key",
            lambda: all("the old certificate is kept" in log(pod) for pod in webhooks),
            seconds=150,
        )
        place.system.run("scale", "deployment/kvshare-controller", "--replicas=1")
        place.wait(
            "both webhooks serve a new certificate",
            lambda: all("a new certificate is served" in log(pod) for pod in webhooks),
            seconds=240,
        )
    assert missed == []
