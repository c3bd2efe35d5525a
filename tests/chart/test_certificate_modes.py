"""Who makes the webhook's certificate: controller, cert-manager or user. Each mode as rendered and as it serves."""

from __future__ import annotations

import base64
import datetime
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from helm_chart import environment_of, kinds, one, pod_of, refused, rendered
from installed import Installation, bare_api, installation, until
from kvshare_operator.api import names
from kvshare_operator.core import certificates
from kvshare_operator.settings import read_settings
from pods import Json, pod_p0, pool_p1
from testbed.cluster import Cluster
from testbed.kubectl import KubectlError

pytestmark = pytest.mark.apiserver
CRDS = pathlib.Path(__file__).parent / "testdata" / "crds"
HOSTS = ("localhost",)


def issue(older: certificates.Material | None = None) -> certificates.Material:
    """A CA and a certificate for this machine; ``older`` stays in the bundle."""
    renewal = certificates.renewed(None, HOSTS, datetime.datetime.now(datetime.UTC))
    assert renewal is not None
    made = renewal[0]
    bundle = made.bundle + (older.bundle if older else "")
    return certificates.Material(bundle, made.ca_key, made.certificate, made.key)


def own_secret(material: certificates.Material) -> Json:
    """The values of somebody who brings a certificate."""
    return {"certificates": {"mode": "Secret", "secretName": "mine", "caBundle": material.bundle}}


CERT_MANAGER: Json = {"certificates": {"mode": "CertManager"}}


@pytest.fixture(scope="module")
def cert_manager() -> Iterator[Cluster]:
    """An API server that knows cert-manager's resources."""
    with bare_api() as (api, _):
        for name in ("certificates", "issuers"):
            api.kubectl.apply((CRDS / f"{name}.yaml").read_text())
            api.kubectl.run("wait", "--for=condition=Established", f"crd/{name}.cert-manager.io", "--timeout=30s")
        yield api


@pytest.mark.parametrize(
    "more",
    [{}, {"issuerRef": {"name": "corp", "kind": "ClusterIssuer", "group": "issuers.example.org"}, "duration": "240h",
          "renewBefore": "80h"}],
    ids=["own CA", "an issuer of the user's"],
)  # fmt: skip
def test_objects_for_cert_manager_fit_its_schemas(cert_manager: Cluster, more: Json) -> None:
    """Strict validation by the API server with the definitions that cert-manager ships."""
    objects = rendered(values={"certificates": {"mode": "CertManager", "certManager": more}})
    theirs = [thing for thing in objects if thing["apiVersion"] == "cert-manager.io/v1"]
    assert len(theirs) == (1 if more else 4)
    for thing in theirs:
        cert_manager.kubectl.within("kvshare-system").run(
            "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(thing)
        )
    wrong = {**theirs[-1], "spec": {**theirs[-1]["spec"], "dnsName": "x"}}
    with pytest.raises(KubectlError, match="dnsName"):
        cert_manager.kubectl.within("kvshare-system").run(
            "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(wrong)
        )


def test_cert_manager_signs_for_the_webhooks_names_and_injects_the_ca() -> None:
    """Certificate, mounted Secret, and annotation fit each other; the chain of issuers is closed."""
    objects = rendered(values=CERT_MANAGER)
    leaf = one(objects, "Certificate", "kvshare-webhook")["spec"]
    assert tuple(leaf["dnsNames"]) == read_settings(environment_of(objects, "webhook")).dns_names
    assert "server auth" in leaf["usages"]
    (source,) = pod_of(objects, "webhook")["volumes"][0]["projected"]["sources"]
    assert source["secret"]["name"] == leaf["secretName"] == "kvshare-webhook-certificates"
    issuer = one(objects, "Issuer", leaf["issuerRef"]["name"])["spec"]
    authority = one(objects, "Certificate", "kvshare-webhook-ca")["spec"]
    assert (authority["isCA"], authority["secretName"]) == (True, issuer["ca"]["secretName"])
    assert one(objects, "Issuer", authority["issuerRef"]["name"])["spec"] == {"selfSigned": {}}
    configuration = one(objects, "MutatingWebhookConfiguration", "kvshare")
    assert configuration["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": "kvshare-system/kvshare-webhook",
        names.CERTIFICATE_SECRET: "kvshare-webhook-certificates",
    }
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]


@pytest.mark.parametrize("mode", ["CertManager", "Secret"])
def test_controller_needs_no_right_on_certificates_that_others_make(mode: str) -> None:
    """Neither a Secret nor a webhook configuration; the controller is told so."""
    objects = rendered(values=CERT_MANAGER if mode == "CertManager" else own_secret(issue()))
    resources = {
        resource
        for thing in objects
        if thing["kind"] in ("Role", "ClusterRole")
        for rule in thing["rules"]
        for resource in rule["resources"]
    }
    assert not resources & {"secrets", "mutatingwebhookconfigurations"}
    assert read_settings(environment_of(objects, "controller")).certificate_mode == mode


def test_own_secret_needs_no_ca_in_it() -> None:
    """A Secret of type kubernetes.io/tls will do: CA and API server's trust come from the values."""
    material = issue()
    objects = rendered(values=own_secret(material))
    configuration = one(objects, "MutatingWebhookConfiguration", "kvshare")
    assert configuration["metadata"]["annotations"] == {names.CERTIFICATE_SECRET: "mine"}
    hook = configuration["webhooks"][0]
    assert base64.b64decode(hook["clientConfig"]["caBundle"]).decode() == material.bundle
    assert one(objects, "ConfigMap", "kvshare-webhook-ca")["data"]["ca.crt"].strip() == material.bundle.strip()
    secret, ca = pod_of(objects, "webhook")["volumes"][0]["projected"]["sources"]
    assert secret["secret"]["name"] == "mine"
    assert [item["key"] for item in secret["secret"]["items"]] == ["tls.crt", "tls.key"]
    assert (ca["configMap"]["name"], ca["configMap"]["items"][0]["path"]) == ("kvshare-webhook-ca", "ca.crt")
    assert not kinds(objects) & {"Certificate", "Issuer"}


CONTRADICTIONS: dict[str, tuple[Json, str]] = {
    "no Secret": ({"mode": "Secret", "caBundle": "-----BEGIN CERTIFICATE-----"}, "certificates.secretName: nothing"),
    "no CA": ({"mode": "Secret", "secretName": "mine"}, "certificates.caBundle: nothing given, CA certificates as PEM"),
    "no PEM": ({"mode": "Secret", "secretName": "mine", "caBundle": "MIIB"}, "certificates.caBundle: no certificate"),
    "a key": (
        {"mode": "Secret", "secretName": "m", "caBundle": "-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----"},
        "certificates.caBundle: a private key given",
    ),
    "a CA that nobody uses": ({"caBundle": "x"}, "nothing expected with certificates.mode SelfManaged"),
    "an issuer that nobody asks": (
        {"certManager": {"issuerRef": {"name": "x"}}},
        "certificates.certManager.issuerRef: an issuer given",
    ),
    "renewed before it is made": (
        {"mode": "CertManager", "certManager": {"duration": "100h", "renewBefore": "100h"}},
        "less than certificates.certManager.duration (100h) expected",
    ),
    "an issuer without a name": ({"mode": "CertManager", "certManager": {"issuerRef": {"kind": "Issuer"}}}, "name"),
    "an unknown mode": ({"mode": "Mine"}, "'SelfManaged', 'CertManager', 'Secret'"),
}


@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradicting_values_are_refused_with_the_remedy(values: Json, words: str) -> None:
    """Given, expected, what to do."""
    assert words in refused({"certificates": values})


def test_all_contradictions_are_named_at_once() -> None:
    """Nobody has to try five times."""
    said = refused({"certificates": {"mode": "Secret", "certManager": {"issuerRef": {"name": "x"}}}})
    assert "3 value(s) cannot be used" in said


def injected(place: Installation, name: str) -> Json:
    """Create a pod of pool p1 and return its record annotations."""
    pod = pod_p0()
    pod["metadata"].update(name=name, namespace="team")
    place.kubectl.within("team").create(json.dumps(pod))
    found: Json = place.kubectl.within("team").get("pod", name)["metadata"]["annotations"]
    return found


def pool_in_team() -> Json:
    """Pool p1, of which pods are denied when something is wrong."""
    pool = pool_p1(onConflict="Reject")
    pool["metadata"] = {"name": "p1", "namespace": "team"}
    return pool


def put(place: Installation, material: certificates.Material) -> None:
    """What a kubelet does when Secret and ConfigMap have changed."""
    for key, text in (("ca.crt", material.bundle), ("tls.crt", material.certificate), ("tls.key", material.key)):
        (place.certificates / key).write_text(text)


def test_own_secret_is_served_and_its_successor_too_without_a_restart() -> None:
    """Mode Secret with a webhook that fails closed, through a change of CA; the controller is refused nothing."""
    first = issue()
    second = issue(first)
    failing: dict[str, Any] = {"webhook": {"failurePolicy": "Fail"}}
    with bare_api("team") as (api, folder), installation(
        api, folder, rendered(values={**own_secret(first), **failing})
    ) as place:  # fmt: skip
        put(place, first)
        place.kubectl.within("team").apply(pool_in_team())
        place.start("controller")
        place.start("webhook")
        place.wait_until_ready()
        assert json.loads(injected(place, "one")[names.INJECTED])["storeTP"] == 4
        ends = place.metric("webhook", "kvshare_operator_certificate_expires_timestamp_seconds")
        assert ends == certificates.expires(first.certificate).timestamp()

        # As the guide says: trust both first, then swap the certificate.
        both = rendered(values={**own_secret(second), **failing})
        configuration = one(both, "MutatingWebhookConfiguration", "kvshare")
        bundle = configuration["webhooks"][0]["clientConfig"]["caBundle"]
        patch = [{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
        place.kubectl.run("patch", "mutatingwebhookconfiguration", "kvshare", "--type=json", "-p", json.dumps(patch))
        injected(place, "between")
        put(place, second)
        until(
            lambda: (
                place.metric("webhook", "kvshare_operator_certificate_expires_timestamp_seconds") > 0
                and "a new certificate is served" in place.log("webhook")
            ),
            "the new certificate is served",
        )
        annotations = injected(place, "two")
        assert annotations[names.REPORT_CA] == second.bundle
        until(
            lambda: place.kubectl.within("team").get("kvsharepool", "p1").get("status", {}).get("storeTPSize") == 4,
            "the controller works",
        )
        for process in ("controller", "webhook"):
            assert "forbidden" not in place.log(process).lower(), place.log(process)


def test_self_managed_certificates_are_issued_with_the_charts_own_permissions() -> None:
    """The controller's service account may do what it needs, and the API server calls the webhook with its CA."""
    with bare_api("team") as (api, folder), installation(
        api, folder, rendered("webhook.failurePolicy=Fail")
    ) as place:  # fmt: skip
        place.kubectl.within("team").apply(pool_in_team())
        place.start("controller")
        until(lambda: bool(place.kubectl.within("kvshare-system").list("secrets")), "certificates are issued")
        place.mount_secret("kvshare-webhook-certificates")
        place.start("webhook")
        place.wait_until_ready()
        assert json.loads(injected(place, "one")[names.INJECTED])["storeTP"] == 4
        for process in ("controller", "webhook"):
            assert "forbidden" not in place.log(process).lower(), place.log(process)


def test_definitions_of_others_are_what_they_publish() -> None:
    """Test data that is no schema would accept everything."""
    for path in CRDS.glob("*.yaml"):
        definition = yaml.safe_load(path.read_text())
        (version,) = [one for one in definition["spec"]["versions"] if one["served"]]
        assert version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        assert path.read_text().startswith(("# cert-manager v", "# prometheus-operator v"))
