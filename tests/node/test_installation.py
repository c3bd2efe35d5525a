"""The chart on the one-node cluster as its author means it: `helm test`, its permissions, and other certificates.

No engine runs here: members are pods that need not start, and the report of one is sent with its own token. Each test
goes on where the one before stopped.
"""

from __future__ import annotations

import base64
import datetime
import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helm_chart import without_hooks
from kvshare_layout import reports
from kvshare_operator.api import names
from kvshare_operator.core import certificates
from permissions import problems
from pods import annotated, pod_p0, pool_p1
from testbed import places
from testbed.audit import requests
from testbed.cluster import Cluster, cluster
from testbed.demo import product
from testbed.demo.place import OwnCluster
from testbed.kubectl import Kubectl, Object
from testbed.prepare.go_programs import program

pytestmark = pytest.mark.scenario
SYSTEM = product.NAMESPACE
TEAM = "team"
HOST = f"kvshare-webhook.{SYSTEM}.svc"


class Place:
    """The cluster with the product."""

    def __init__(self, running: Cluster) -> None:
        self.state = running.state
        self.on = OwnCluster(running)
        self.kubectl: Kubectl = running.kubectl.within(TEAM)
        self.system: Kubectl = running.kubectl.within(SYSTEM)

    def helm(self, *words: str) -> str:
        """Run helm on the release and return what it prints."""
        options = ["--kubeconfig", str(self.kubectl.kubeconfig), "--namespace", SYSTEM]
        command = [str(program("helm")), *words, *options]
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}\n{self.system.what_happens()}"
        return finished.stdout

    def create(self, name: str, pod: Object) -> Object:
        """Create a pod that no node starts; return it as it is stored."""
        pod["spec"]["nodeSelector"] = {"kvshare.test/none": "x"}
        pod["metadata"] = {**pod["metadata"], "name": name, "namespace": TEAM}
        self.kubectl.create(json.dumps(pod))
        return self.kubectl.get("pod", name)

    def status(self) -> Object:
        """The pool's status."""
        found: Object = self.kubectl.get("kvsharepool", "p1").get("status", {})
        return found

    def report(self, pod: Object, authority: str) -> None:
        """Send the report of a member, over the webhook's Service."""
        token = self.kubectl.run(
            "create", "token", "default", "--bound-object-kind=Pod", f"--bound-object-name={pod['metadata']['name']}",
            f"--bound-object-uid={pod['metadata']['uid']}", f"--audience={names.TOKEN_AUDIENCE}",
        ).strip()  # fmt: skip
        body = reports.to_json(
            reports.MemberReport(
                pool_prefix=self.status()["cacheNamespace"], verdict="shared", reason="Shared", message="shares",
                fingerprint="ab" * 16, namespace="n", store_tp=4, tp=2, pp=1, rank_layouts=("LBNHC",), kv_heads=8,
                block_tokens=16, manifest={"dtype": "float32"}, engine="0.32.0",
            )
        )  # fmt: skip
        context = ssl.create_default_context(cadata=authority)
        context.check_hostname = False  # this machine does not resolve the cluster's names
        address = self.system.get("service", "kvshare-webhook")["spec"]["clusterIP"]
        asked = urllib.request.Request(f"https://{address}:9444/v1/report", data=body)
        asked.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(asked, context=context, timeout=20) as answer:
            assert answer.status == 200


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The product, and a namespace for pools."""
    with cluster(places.CACHE / "cluster" / "install-tests", images=OwnCluster.archives()) as running:
        made = Place(running)
        running.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}})
        product.install(made.on, {"controller.sweepSeconds": "10", "controller.fullPassSeconds": "10"})
        yield made


def test_helm_test_passes_and_leaves_nothing(place: Place) -> None:
    """In a restricted namespace, with the operator's image, through API server and webhook and back."""
    assert "Succeeded" in place.helm("test", "kvshare")
    left = [thing["metadata"]["name"] for kind in ("pods", "serviceaccounts") for thing in place.system.list(kind)]
    assert "kvshare-test" not in left
    assert place.kubectl.within("default").list("roles") == []


def test_what_is_granted_is_what_is_used(place: Place) -> None:
    """Pools of both kinds, a member with its report, refusals: every permission is used, and none is missing."""
    external = pool_p1()
    external["metadata"] = {"name": "p1", "namespace": TEAM}
    managed = pool_p1(
        store={"type": "Managed", "managed": {"capacityPerNode": "256Mi", "image": place.on.engine_image}}
    )
    managed["metadata"] = {"name": "own", "namespace": TEAM}
    place.kubectl.apply(external, managed)
    place.system.wait_for("the pool is looked at", lambda: place.status().get("storeTPSize") == 4, seconds=60)
    place.system.wait_for("the store is made", lambda: bool(place.kubectl.list("networkpolicies")), seconds=60)
    place.create("lost", annotated(pod_p0(), pool="nope"))
    place.create("refused", pod_p0(args=["-tp", "3"]))
    member = place.create("member", pod_p0())
    place.report(member, member["metadata"]["annotations"][names.REPORT_CA])
    place.system.wait_for("the report counts", lambda: place.status()["members"].get("shared") == 1, seconds=60)
    place.kubectl.delete("kvsharepool", "own")
    objects = [thing for thing in yaml.safe_load_all(place.helm("get", "manifest", "kvshare")) if thing]
    assert problems(without_hooks(objects), set(requests(place.state))) == []


def test_certificate_of_the_users_own_takes_over_and_is_replaced(place: Place, tmp_path: Path) -> None:
    """Mode Secret on a real kubelet: another CA by `helm upgrade`, then another certificate in the mounted Secret."""
    first = own_certificate()
    write_secret(place, first)
    (tmp_path / "ca.crt").write_text(first.bundle)
    place.helm(
        "upgrade", "kvshare", str(product.CHART), "--reset-then-reuse-values", "--force-conflicts", "--wait",
        "--timeout=150s", "--set=certificates.mode=Secret", "--set=certificates.secretName=mine",
        f"--set-file=certificates.caBundle={tmp_path / 'ca.crt'}",
    )  # fmt: skip
    assert "Succeeded" in place.helm("test", "kvshare")
    second = renewed_by_the_same_ca(first)
    write_secret(place, second)
    wanted = ssl.PEM_cert_to_DER_cert(second.certificate)
    address = place.system.get("service", "kvshare-webhook")["spec"]["clusterIP"]
    deadline = time.monotonic() + 150
    served: set[bytes] = set()
    while served != {wanted}:  # each try may meet the other replica
        assert time.monotonic() < deadline, "the kubelet did not bring the new certificate, or it is not served"
        served = {ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((address, 443))) for _ in range(8)}
        time.sleep(1)
    assert "Succeeded" in place.helm("test", "kvshare")
    asked = {request.resource for request in requests(place.state) if request.code == 403}
    assert asked == set()


def own_certificate() -> certificates.Material:
    """A CA and a certificate for the webhook's Service."""
    renewal = certificates.renewed(None, (HOST,), datetime.datetime.now(datetime.UTC))
    assert renewal is not None
    return renewal[0]


def renewed_by_the_same_ca(old: certificates.Material) -> certificates.Material:
    """The next certificate of the same CA."""
    renewal = certificates.renewed(old, (HOST, f"{HOST}.cluster.local"), datetime.datetime.now(datetime.UTC))
    assert renewal is not None
    return renewal[0]


def write_secret(place: Place, material: certificates.Material) -> None:
    """The Secret that the user keeps, without a CA in it."""
    data = {"tls.crt": material.certificate, "tls.key": material.key}
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
    metadata = {"name": "mine", "namespace": SYSTEM}
    place.system.apply(
        {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": encoded}
    )
