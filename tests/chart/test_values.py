"""Values: every key is known and reaches the pods; nothing else is taken. The defaults render as written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from helm_chart import CHART, SNAPSHOT, helm, one, pod_of, refused, rendered, snapshot, template
from pods import Json

pytestmark = pytest.mark.apiserver
VALUES: Json = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Json = json.loads((CHART / "values.schema.json").read_text())
FREE = {"resources", "nodeSelector", "affinity", "labels", "annotations"}
"""What Kubernetes itself checks."""


def resolved(schema: Json) -> Json:
    """A schema without its reference."""
    if "$ref" in schema:
        found: Json = SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[1]]
        return found
    return schema


def branches(values: Json, schema: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Json, Json]]:
    """Every object of the values with its schema."""
    schema = resolved(schema)
    yield path, values, schema
    for key, value in values.items():
        if isinstance(value, dict) and key not in FREE:
            yield from branches(value, schema["properties"][key], (*path, key))


def names_of(values: Json, before: str = "") -> Iterator[str]:
    """Every value by its path, down to what Kubernetes itself checks."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in FREE:
            yield from names_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def test_list_of_values_that_an_upgrade_may_lack_is_whole() -> None:
    """Values that `helm upgrade --reuse-values` leaves out are told by this list."""
    text = (CHART / "templates" / "_checks.tpl").read_text()
    listed = text.partition('{{- define "kvshare.valueNames" -}}')[2].partition("{{- end -}}")[0]
    assert listed.split() == list(names_of(VALUES))


@pytest.mark.parametrize(
    ("path", "values", "schema"), [pytest.param(*branch, id=".".join(branch[0]) or "all") for branch in
                                   branches(VALUES, SCHEMA)]
)  # fmt: skip
def test_schema_knows_exactly_the_keys_of_the_values(path: tuple[str, ...], values: Json, schema: Json) -> None:
    """A new value without a schema, or a key of the schema that nobody documents, is noticed."""
    assert schema["additionalProperties"] is False
    known = set(schema["properties"]) - ({"global"} if not path else set())
    if path == ("certificates", "certManager", "issuerRef"):
        assert values == {}
    else:
        assert known == set(values)


def nested(path: str, value: Any) -> Json:
    """One value by its dotted path."""
    made: Any = value
    for key in reversed(path.split(".")):
        made = {key: made}
    found: Json = made
    return found


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("unknown", 1, "additional properties 'unknown' not allowed"),
        ("webhook.replica", 3, "at '/webhook': additional properties 'replica' not allowed"),
        ("image.tags", "x", "at '/image': additional properties 'tags' not allowed"),
        ("webhook.failurePolicy", "Maybe", "'Ignore', 'Fail'"),
        ("webhook.replicas", 0, "minimum: got 0, want 1"),
        ("webhook.timeoutSeconds", 1, "minimum: got 1, want 5"),
        ("webhook.topologySpreadConstraints", [{"maxSkew": 1}], "topologyKey"),
        ("imagePullSecrets", ["mine"], "got string, want object"),
        ("managedStore.runAsUser", "root", "got string, want integer"),
        ("certificates.certManager.duration", "90d", "does not match pattern"),
        ("monitoring.memberMonitor.port", "", "minLength"),
        ("helmTest.namespace", "kube-system", "helmTest.namespace: kube-system given"),
    ],
)
def test_unknown_or_impossible_values_are_refused_with_their_path(path: str, value: Any, words: str) -> None:
    """A typo is not silently ignored."""
    said = refused(nested(path, value))
    assert words in said, said


def test_defaults_render_as_written() -> None:
    """A change of what is installed shows in the change's diff."""
    if os.environ.get("KVSHARE_WRITE"):
        SNAPSHOT.write_text(snapshot())
    assert snapshot() == SNAPSHOT.read_text(), "run this test with KVSHARE_WRITE=1 and look at the difference"


def leaves(node: Any) -> Iterator[Any]:
    """Every single value of an object."""
    if isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from leaves(value)
    else:
        yield node


@pytest.mark.parametrize("mode", ["SelfManaged", "CertManager"])
def test_names_that_look_like_numbers_or_booleans_stay_text(mode: str) -> None:
    """Namespaces of tenants are often numbers; the API server takes text only."""
    monitors = {name: {"enabled": True} for name in ("dashboard", "alerts", "podMonitor", "serviceMonitor")}
    issuer = {"certManager": {"issuerRef": {"name": "70107"}}} if mode == "CertManager" else {}
    values = {
        "watchNamespaces": ["70101", "on"],
        "webhook": {"excludedNamespaces": ["70102"], "priorityClassName": "70103"},
        "controller": {"priorityClassName": "70103"},
        "certificates": {"mode": mode, "secretName": "70104", **issuer},
        "networkPolicies": {"enabled": True},
        "monitoring": {**monitors, "memberMonitor": {"enabled": True, "port": "70105"}},
    }
    finished = template("--namespace", "70106", release="70107", values=values)
    assert finished.returncode == 0, finished.stderr
    objects = [thing for thing in yaml.safe_load_all(finished.stdout) if thing]
    assert {thing["metadata"].get("namespace", "70106") for thing in objects} == {"70106", "70101", "on"}
    assert not [value for thing in objects for value in leaves(thing) if value in range(70101, 70108)]
    configuration = one(objects, "MutatingWebhookConfiguration", "70107-kvshare")
    watched, left_out = configuration["webhooks"][0]["namespaceSelector"]["matchExpressions"]
    assert (watched["values"], left_out["values"]) == (["70101", "on"], ["kube-system", "70106", "70102"])


@pytest.mark.parametrize("process", ["controller", "webhook"])
def test_placement_and_pull_secrets_reach_the_pods(process: str) -> None:
    """Each field where Kubernetes wants it."""
    toleration = {"key": "a", "operator": "Exists"}
    affinity: Json = {"nodeAffinity": {}}
    resources = {"limits": {"memory": "1Gi"}}
    placed = {
        "priorityClassName": "high", "nodeSelector": {"zone": "x"}, "tolerations": [toleration], "affinity": affinity,
        "resources": resources,
    }  # fmt: skip
    pod = pod_of(rendered(values={process: placed, "imagePullSecrets": [{"name": "mine"}]}), process)
    assert pod["priorityClassName"] == "high"
    assert (pod["nodeSelector"], pod["tolerations"], pod["affinity"]) == ({"zone": "x"}, [toleration], affinity)
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}
    other = pod_of(rendered(values={process: placed}), {"controller": "webhook", "webhook": "controller"}[process])
    assert not {"priorityClassName", "nodeSelector", "tolerations"} & set(other)


def test_webhook_replicas_spread_and_the_users_spread_takes_its_place() -> None:
    """Zones and nodes are preferred, never required, until the user says so; the selector is the chart's."""
    default = pod_of(rendered(), "webhook")
    (spread,) = default["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("topology.kubernetes.io/zone", "ScheduleAnyway")
    assert "preferredDuringSchedulingIgnoredDuringExecution" in default["affinity"]["podAntiAffinity"]
    mine = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
    objects = rendered(values={"webhook": {"topologySpreadConstraints": [mine]}})
    (spread,) = pod_of(objects, "webhook")["topologySpreadConstraints"]
    selector = spread.pop("labelSelector")["matchLabels"]
    assert spread == mine
    labels = one(objects, "Deployment", "kvshare-webhook")["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()


def test_disruption_budget_covers_the_webhook_only_and_can_be_left_out() -> None:
    """The controller may be away for a while; a budget of one replica would block every drain."""
    (budget,) = [thing for thing in rendered() if thing["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "webhook"
    assert not any(thing["kind"] == "PodDisruptionBudget" for thing in rendered("podDisruptionBudget.enabled=false"))


def test_network_policies_open_the_ports_that_are_asked_and_metrics_for_whom_the_user_names() -> None:
    """Reviews from anywhere; reports from the watched namespaces; metrics from the named peers."""
    peer = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    values = {"networkPolicies": {"enabled": True, "metricsFrom": [peer]}, "watchNamespaces": ["team"]}
    objects = rendered(values=values)
    review, report, metrics = one(objects, "NetworkPolicy", "kvshare-webhook")["spec"]["ingress"]
    assert ([port["port"] for port in review["ports"]], "from" in review) == ([9443], False)
    assert [port["port"] for port in report["ports"]] == [9444]
    (term,) = report["from"][0]["namespaceSelector"]["matchExpressions"]
    assert term["values"] == ["team"]
    assert ([port["port"] for port in metrics["ports"]], metrics["from"]) == ([8080], [peer])
    (only,) = one(objects, "NetworkPolicy", "kvshare-controller")["spec"]["ingress"]
    assert only["from"] == [peer]
    for thing in objects:
        if thing["kind"] == "Deployment":
            ports = {port["containerPort"] for port in thing["spec"]["template"]["spec"]["containers"][0]["ports"]}
            policy = one(objects, "NetworkPolicy", thing["metadata"]["name"])["spec"]["ingress"]
            assert ports == {port["port"] for rule in policy for port in rule["ports"]}


def test_helm_test_asks_in_a_namespace_that_the_webhook_sees() -> None:
    """Restricted, with a permission of its own that comes and goes with the test."""
    objects = rendered("watchNamespaces={team}")
    pod = one(objects, "Pod", "kvshare-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["containers"][0]["args"] == ["dry-run", "--namespace", "team"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    role = one(objects, "Role", "kvshare-test", "team")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}]
    for thing in objects:
        if thing["metadata"]["name"] == "kvshare-test":
            assert thing["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert one(rendered(), "Role", "kvshare-test", "default")
    assert not any(thing["metadata"]["name"] == "kvshare-test" for thing in rendered("helmTest.enabled=false"))


def test_release_in_the_namespace_default_has_no_test_rather_than_a_wrong_one() -> None:
    """Pods beside the operator are never looked at."""
    finished = template("--namespace", "default")
    assert finished.returncode == 0, finished.stderr
    names = [thing["metadata"]["name"] for thing in yaml.safe_load_all(finished.stdout) if thing]
    assert "kvshare-webhook" in names
    assert "kvshare-test" not in names


def test_notes_name_the_next_steps_of_this_installation() -> None:
    """Of its namespaces, its certificate and its test; rendered by a dry run, as helm shows notes on install only."""
    words = ("install", "kvshare", str(CHART), "--namespace", "kvshare-system", "--dry-run=client")
    plain = helm(*words).stdout
    assert "helm test kvshare --namespace kvshare-system" in plain
    assert "kubectl -n inference describe kvsharepool llama" in plain
    managed = helm(*words, "--set", "certificates.mode=CertManager", "--set", "watchNamespaces={team}").stdout
    assert "certificate/kvshare-webhook" in managed
    assert "for pods in team" in managed
