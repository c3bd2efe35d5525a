"""Both processes as they are shipped, against a real kube-apiserver: injection, reports, status, silence, stop.

Only the certificates take a short cut: a test copies the Secret into the folder that a kubelet would mount.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kvshare_layout import reports
from kvshare_operator.api import crd, names
from operator_processes import SECRET, OperatorProcesses, ask, looked_again, mount_certificates, until
from pods import Json, annotated, pod_p0, pool_p1
from testbed.cluster import Cluster, api_server
from testbed.kubectl import KubectlError

pytestmark = pytest.mark.apiserver


class Running(OperatorProcesses):
    """An API server with both processes beside it."""

    def __init__(self, api: Cluster, folder: pathlib.Path) -> None:
        super().__init__(api.kubeconfig, folder, sweep_seconds=1, drain_seconds=10)
        self.api, self.kubectl = api, api.kubectl
        self.admission, self.report = self.admission_ports["webhook"], self.report_ports["webhook"]

    def mount_certificates(self) -> str:
        """Copy the Secret's public parts where the webhook looks; return the CA."""
        mount_certificates(self.kubectl, SECRET, self.certificates)
        return (self.certificates / "ca.crt").read_text()

    def ask(self, path: str, port: int, body: bytes | None = None, token: str = "") -> tuple[int, str]:
        """Call the webhook process over TLS; return status and text."""
        return ask(self.certificates, path, port, body, token)

    def status(self) -> Json:
        """The pool's status."""
        found: Json = self.kubectl.get("kvsharepool", "p1").get("status", {})
        return found

    def condition(self, kind: str) -> Json:
        """One condition of the pool."""
        found = [one for one in self.status().get("conditions", []) if one["type"] == kind]
        return found[0] if found else {}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Both processes serve; the resource was installed after they had started; pool p1 exists."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as api,
    ):
        place = Running(api, pathlib.Path(folder))
        try:
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            api.kubectl.apply(account, webhook_configuration(place))
            place.start("controller")
            place.start("webhook")
            until(lambda: bool(api.kubectl.list("secrets")), "the controller issues certificates")
            place.mount_certificates()
            until(lambda: place.ask("/readyz", place.admission)[0] == 200, "the webhook is ready")
            api.kubectl.apply(crd.manifest())
            api.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
            api.kubectl.apply(pool())
            until(lambda: place.status().get("storeTPSize") == 4, "the late resource is watched")
            yield place
        finally:
            place.end_all()


def webhook_configuration(place: Running) -> Json:
    """The chart's configuration, pointing at this machine."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "kvshare"},
        "webhooks": [
            {
                "name": "inject.kvshare.dev",
                "admissionReviewVersions": ["v1"],
                "clientConfig": {"url": f"https://localhost:{place.admission}/inject"},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
                "failurePolicy": "Fail",
                "sideEffects": "None",
            }
        ],
    }


def pool(**spec: Any) -> Json:
    """Pool p1 in the default namespace."""
    made = pool_p1(onConflict="Reject", **spec)
    made["metadata"] = {"name": "p1", "namespace": "default"}
    return made


def create(place: Running, name: str, pod: Json) -> Json:
    """Create a pod and return it as it is stored."""
    pod["metadata"] = {**pod["metadata"], "name": name, "namespace": "default"}
    place.kubectl.create(json.dumps(pod))
    return place.kubectl.get("pod", name)


def remove(place: Running, *pods: str) -> None:
    """Delete pods that no kubelet runs."""
    for name in pods:
        place.kubectl.delete("pod", name, "--grace-period=0", "--force")


def test_check_sees_what_both_processes_did(running: Running) -> None:
    """The dry run is injected and leaves nothing; the pool's problem and the member's state are shown."""
    create(running, "checked", pod_p0())
    until(lambda: running.status()["members"]["unreported"] == 1, "it is a member")
    until(lambda: running.condition("Ready").get("reason") == "StoreUnreachable", "the store was tried")
    environment = {**os.environ, "KUBECONFIG": str(running.api.kubeconfig)}
    code = "from kvshare_operator.cli.main import main; main()"
    command = [sys.executable, "-c", code, "check"]
    result = subprocess.run([*command, "-o", "json"], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert found["webhook"]["dryRunInjected"] is True
    assert [(one["name"], one["state"]) for one in found["pools"][0]["owners"]] == [("pod/checked", "unreported")]
    table = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "StoreUnreachable" in table.stdout
    assert [one["metadata"]["name"] for one in running.kubectl.list("pods")] == ["checked"]
    remove(running, "checked")
    until(lambda: running.status()["members"]["total"] == 0, "it is gone")


def test_pod_is_injected_on_its_way_and_again_from_a_copy(running: Running) -> None:
    """Through the API server's own patching; F7: a copied YAML is evaluated anew."""
    stored = create(running, "one", pod_p0())
    assert stored["metadata"]["labels"][names.MEMBER] == "p1"
    assert any("store_tp_size=4" in word for word in stored["spec"]["containers"][0]["args"])
    copied = {key: stored[key] for key in ("apiVersion", "kind", "spec")}
    copied["metadata"] = {key: stored["metadata"][key] for key in ("annotations", "labels")}
    again = create(running, "copy", copied)
    assert again["spec"]["containers"] == stored["spec"]["containers"]
    until(lambda: running.status()["members"]["unreported"] == 2, "both are members")
    remove(running, "one", "copy")
    until(lambda: running.status()["members"]["total"] == 0, "both are gone")


def test_pod_that_cannot_join_is_denied_with_the_remedy(running: Running) -> None:
    """What a person reads in the terminal."""
    with pytest.raises(KubectlError) as caught:
        create(running, "wrong", pod_p0(args=["-tp", "3"]))
    assert "TPNotInPool" in str(caught.value)
    assert "Add 3 to the pool's tensorParallelSizes" in str(caught.value)


def test_dry_run_has_no_effect(running: Running) -> None:
    """A review has no side effects."""
    pod = pod_p0()
    pod["metadata"].update(name="dry", namespace="default")
    running.kubectl.run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    assert running.status()["members"]["total"] == 0


def test_pod_of_an_unknown_pool_starts_with_a_record_of_the_reason(running: Running) -> None:
    """Trouble of that kind never denies; the record says why, and disappears with the pod."""
    stored = create(running, "lost", annotated(pod_p0(), pool="nope"))
    assert json.loads(stored["metadata"]["annotations"][names.INJECTED])["reason"] == "PoolNotFound"
    assert stored["spec"]["containers"][0]["args"] == ["--tensor-parallel-size", "2"]
    remove(running, "lost")


def test_report_with_a_pods_own_token_reaches_condition_and_status(running: Running) -> None:
    """5.4, with a real bound token; `kubectl wait` works; another audience is denied."""
    stored = create(running, "member", pod_p0())
    binding = (
        "--bound-object-kind=Pod",
        "--bound-object-name=member",
        f"--bound-object-uid={stored['metadata']['uid']}",
    )
    body = reports.to_json(
        reports.MemberReport(
            pool_prefix=running.status()["cacheNamespace"], verdict="shared", reason="Shared", message="shares",
            fingerprint="ab" * 16, namespace="n", store_tp=4, tp=2, pp=1, rank_layouts=("LBNHC",), kv_heads=8,
            block_tokens=16, manifest={"dtype": "float32"}, engine="0.32.0",
        )
    )  # fmt: skip
    foreign = running.kubectl.run("create", "token", "default", *binding, "--audience=other").strip()
    assert running.ask("/v1/report", running.report, body, foreign)[0] == 401
    token = running.kubectl.run("create", "token", "default", *binding, f"--audience={names.TOKEN_AUDIENCE}").strip()
    assert running.ask("/v1/report", running.report, body, token) == (200, "stored\n")
    running.kubectl.run("wait", f"--for=condition={names.SHARED}", "pod/member", "--timeout=10s")
    until(lambda: running.status()["members"]["shared"] == 1, "the member is counted")
    assert running.status()["fingerprints"] == [
        {"id": "ab" * 8, "members": 1, "tensorParallelSizes": [2], "layouts": ["LBNHC"]}
    ]
    remove(running, "member")
    until(lambda: running.status()["members"]["total"] == 0, "it is gone")


def test_steady_state_writes_nothing(running: Running) -> None:
    """F1, B61: two processes, several full passes, one resource version."""
    looked_again(running.health["controller"], 2)
    before = running.kubectl.get("kvsharepool", "p1")["metadata"]
    looked_again(running.health["controller"], 4)
    after = running.kubectl.get("kvsharepool", "p1")["metadata"]
    assert before["resourceVersion"] == after["resourceVersion"]
    assert "finalizers" not in after
    assert "annotations" not in after


def test_metrics_and_health_are_served_by_both(running: Running) -> None:
    """Plain HTTP for probes and Prometheus."""
    for name, port in running.health.items():
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert "kvshare_operator_" in text, name
        with urllib.request.urlopen(f"http://localhost:{port}/healthz", timeout=30) as answer:
            assert answer.status == 200


def test_stopping_webhook_drains_and_leaves_its_configuration_alone(running: Running) -> None:
    """B56, F3: not ready at once, answers a little longer, and never touches the configuration."""
    before = running.kubectl.get("mutatingwebhookconfiguration", "kvshare")["metadata"]["resourceVersion"]
    running.processes["webhook"].send_signal(signal.SIGTERM)
    until(lambda: running.ask("/readyz", running.admission)[0] == 503, "it says that it is going", 10)
    review = json.dumps({"request": {"uid": "u"}}).encode()
    status, text = running.ask("/inject", running.admission, review)
    assert (status, json.loads(text)["response"]["allowed"]) == (200, True)
    running.processes.pop("webhook").wait(timeout=30)
    after = running.kubectl.get("mutatingwebhookconfiguration", "kvshare")["metadata"]["resourceVersion"]
    assert after == before
    assert "Traceback" not in running.log("webhook"), running.log("webhook")


def test_pod_that_started_while_no_webhook_served_is_named(running: Running) -> None:
    """B53, F10: found by the sweep; gone when it is replaced."""
    running.kubectl.delete("mutatingwebhookconfiguration", "kvshare")
    create(running, "missed", pod_p0())
    until(lambda: running.condition(names.MEMBERS_CONSISTENT).get("reason") == "NotInjected", "it is found")
    assert running.status()["problems"][0]["owner"] == "pod/missed"
    remove(running, "missed")
    until(lambda: running.condition(names.MEMBERS_CONSISTENT).get("status") == "True", "it is forgotten")


def test_controller_can_be_killed_and_a_pool_is_deleted_without_it(running: Running) -> None:
    """B59: nothing waits for a finalizer; no traceback in its whole life."""
    running.processes["controller"].kill()
    running.processes.pop("controller").wait()
    began = time.monotonic()
    running.kubectl.delete("kvsharepool", "p1")
    assert time.monotonic() - began < 60
    assert "Traceback" not in running.log("controller"), running.log("controller")
