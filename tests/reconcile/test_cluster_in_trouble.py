"""Both processes while the cluster around them fails: API server, etcd, watches, and one of two webhook replicas.

Pods are created all the time by clients that try again, as controllers do. Required each time: every pod is stored,
each is injected as a whole or not at all, and the status tells the truth about all once the fault is gone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvshare_operator.api import crd, names
from operator_processes import OperatorProcesses, until
from pods import Json, pod_p0, pool_p1
from testbed.cluster import Cluster, api_server
from testbed.relay import Relay
from testbed.rest import api_client

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]
PODS = "/api/v1/namespaces/default/pods"
AT_ONCE = 16
PATIENCE = 120.0


class Place(OperatorProcesses):
    """A controller and two webhooks behind one address; all of them reach the API server through a relay.

    Watches that say nothing for three seconds are opened anew.
    """

    def __init__(self, api: Cluster, client: httpx.Client, folder: pathlib.Path) -> None:
        relayed = folder / "relayed.kubeconfig"
        seconds = {"sweep_seconds": 2, "drain_seconds": 1, "watch_silence_seconds": 3}
        super().__init__(relayed, folder, ("webhook-1", "webhook-2"), **seconds)
        self.api, self.client = api, client
        self.service = Relay(*self.admission_ports.values())
        self.way = Relay(int(str(client.base_url).rstrip("/").rpartition(":")[2]))
        config = json.loads(api.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://{self.way.address}"
        relayed.write_text(json.dumps(config))

    def create(self, name: str) -> int:
        """Create a pod that opts in; try again until it is there. Returns the number of tries."""
        pod = pod_p0()
        pod["metadata"] = {"name": name, "namespace": "default", "annotations": {names.POOL: "p1"}}
        deadline, tries = time.monotonic() + PATIENCE, 0
        while True:
            tries += 1
            try:
                answer = self.client.post(PODS, json=pod)
            except httpx.TransportError as error:
                said = repr(error)
            else:
                if answer.status_code in (201, 409):  # 409: an earlier try was stored, and its answer lost
                    return tries
                said = answer.text
            assert time.monotonic() < deadline, f"{name} was never stored: {said}"
            time.sleep(0.2)

    def pods(self) -> list[Json]:
        """All pods."""
        found: list[Json] = self.client.get(PODS).raise_for_status().json()["items"]
        return found

    def counts(self) -> Json:
        """The members that the pool's status counts."""
        answer = self.client.get("/apis/kvshare.dev/v1alpha1/namespaces/default/kvsharepools/p1")
        found: Json = (answer.json().get("status") or {}).get("members") or {}
        return found

    def remove_pods(self) -> None:
        """Delete all pods; no kubelet would have to agree."""
        self.client.delete(PODS, params={"gracePeriodSeconds": 0}).raise_for_status()
        until(lambda: not self.pods() and not self.counts().get("total"), "the pods are gone", 60)


@contextlib.contextmanager
def creation(place: Place, prefix: str, number: int) -> Iterator[list[Future[int]]]:
    """Create pods, sixteen at once, while the block runs and until all are stored."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        made = [threads.submit(place.create, f"{prefix}-{n}") for n in range(number)]
        yield made
        for one in made:
            one.result()


def parts(pod: Json) -> tuple[bool, ...]:
    """Which parts of an injection a pod carries."""
    containers = pod["spec"]["containers"]
    return (
        names.MEMBER in (pod["metadata"].get("labels") or {}),
        "kv_connector=KVShareConnector" in json.dumps(containers),
        any(mount["name"] == names.PAYLOAD_VOLUME for one in containers for mount in one.get("volumeMounts") or []),
        any(volume["name"] == names.PAYLOAD_VOLUME for volume in pod["spec"].get("volumes") or []),
    )


def injected(place: Place, number: int) -> int:
    """How many of the pods are injected; all are there, and none carries a part of an injection only."""
    pods = place.pods()
    assert len(pods) == number, "a pod was lost"
    half = [pod["metadata"]["name"] for pod in pods if any(parts(pod)) and not all(parts(pod))]
    assert half == []
    return sum(all(parts(pod)) for pod in pods)


def truth_is_told(place: Place, number: int, whole: int, seconds: float = 60) -> None:
    """Wait until the status counts every pod, those without injection as well."""
    wanted = (number, number - whole)
    until(
        lambda: (place.counts().get("total"), place.counts().get("notInjected")) == wanted,
        f"{number} counted, {number - whole} of them not injected", seconds,
    )  # fmt: skip
    assert all(process.poll() is None for process in place.processes.values())


def webhook_configuration(port: int) -> Json:
    """As the chart has it: one address for both replicas, and a call that fails costs no pod."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    hook: dict[str, Any] = {
        "name": "inject.kvshare.dev", "admissionReviewVersions": ["v1"], "rules": [rule], "failurePolicy": "Ignore",
        "clientConfig": {"url": f"https://localhost:{port}/inject"}, "sideEffects": "None", "timeoutSeconds": 5,
    }  # fmt: skip
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "kvshare"},
        "webhooks": [hook],
    }


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """Everything serves; pool p1 has been looked at."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as api,
        api_client(api.kubeconfig) as client,
    ):
        made = Place(api, client, pathlib.Path(folder))
        try:
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            api.kubectl.apply(account, webhook_configuration(made.service.port), crd.manifest())
            api.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
            made.start_all(api.kubectl)
            pool = pool_p1(store={"type": "External", "external": {"masterAddress": "127.0.0.1:9"}})
            pool["metadata"] = {"name": "p1", "namespace": "default"}
            api.kubectl.apply(pool)
            until(lambda: "total" in made.counts(), "the pool is looked at")
            until(lambda: trusted(made), "the API server knows the webhook's CA")
            yield made
        finally:
            made.end_all()
            made.service.close()
            made.way.close()


def trusted(place: Place) -> bool:
    """Whether a pod is injected; the configuration's caBundle comes from the controller."""
    place.remove_pods()
    place.create("first")
    done = injected(place, 1) == 1
    place.remove_pods()
    return done


@pytest.fixture(autouse=True)
def clean(place: Place) -> Iterator[None]:
    """No pod before and after a test; the number of full pods says which lack."""
    yield
    place.remove_pods()


def test_webhook_replica_killed_during_a_thousand_creations_costs_no_pod(place: Place) -> None:
    """What it had in hand starts without sharing and is named; the other replica goes on, and a new one joins."""
    with creation(place, "killed", 1000) as made:
        until(lambda: sum(one.done() for one in made) >= 300, "some are there", PATIENCE)
        place.end("webhook-1", signal.SIGKILL)
        until(lambda: sum(one.done() for one in made) >= 600, "more are there", PATIENCE)
        place.start("webhook-1")
    whole = injected(place, 1000)
    assert 1000 - whole <= 2 * AT_ONCE
    truth_is_told(place, 1000, whole)
    until(lambda: place.ready("webhook-1"), "it is ready again")


def test_api_server_killed_and_restarted_during_creations_loses_nothing(place: Place) -> None:
    """Watches and lists of both processes come back by themselves; every pod is injected, for webhooks kept serving."""
    with creation(place, "restarted", 200) as made:
        until(lambda: sum(one.done() for one in made) >= 50, "some are there", PATIENCE)
        place.api.programs.restart("kube-apiserver")
    assert sum(one.result() for one in made) > 200, "nothing was in the way"
    truth_is_told(place, 200, injected(place, 200), 90)
    assert injected(place, 200) == 200


def test_etcd_that_stalls_again_and_again_loses_nothing(place: Place) -> None:
    """Stopped for two seconds at a time: creations wait or fail, and are tried again."""
    etcd, waiting = place.api.programs.named("etcd"), []
    with creation(place, "slow", 200) as made:
        try:
            for _ in range(4):
                etcd.pause()
                time.sleep(2)
                waiting.append(sum(not one.done() for one in made))
                etcd.resume()
                time.sleep(0.2)
        finally:
            etcd.resume()
    assert max(waiting) > AT_ONCE, "nothing was in the way"
    truth_is_told(place, 200, injected(place, 200))


def test_watches_that_are_silently_dead_are_noticed(place: Place) -> None:
    """No connection breaks, nothing comes through any more: pods are still counted, and an edit reaches the webhook."""
    place.way.silence()
    with creation(place, "silent", 20):
        pass
    truth_is_told(place, 20, injected(place, 20), 120)
    assert injected(place, 20) == 20
    place.way.silence()
    patch = {"spec": {"connector": {"image": "example.org/connector:edited"}}}
    place.api.kubectl.run("patch", "kvsharepool", "p1", "--type=merge", f"--patch={json.dumps(patch)}")

    def reaches() -> bool:
        place.remove_pods()
        place.create("edited")
        (pod,) = place.pods()
        return "example.org/connector:edited" in json.dumps(pod["spec"])

    until(reaches, "new pods get what the edited pool says", 120)


def test_bundle_of_the_configuration_is_the_one_that_is_mounted(place: Place) -> None:
    """After everything above: nobody has issued another CA."""
    configuration = place.api.kubectl.get("mutatingwebhookconfiguration", "kvshare")
    bundle = base64.b64decode(configuration["webhooks"][0]["clientConfig"]["caBundle"])
    assert bundle == (place.certificates / "ca.crt").read_bytes()
