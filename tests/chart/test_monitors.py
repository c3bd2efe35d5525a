"""Monitors for Prometheus' operator: as its definitions want them, selecting what is there, off by default."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest

from helm_chart import kinds, one, rendered
from installed import bare_api
from kvshare_operator.api import names
from pods import Json
from testbed.cluster import Cluster
from testbed.kubectl import KubectlError

pytestmark = pytest.mark.apiserver
CRDS = pathlib.Path(__file__).parent / "testdata" / "crds"
ALL: Json = {
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "p"}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "p"}},
        "memberMonitor": {"enabled": True, "port": "api", "labels": {"release": "p"}},
    }
}


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Cluster]:
    """An API server that knows ServiceMonitors and PodMonitors."""
    with bare_api() as (api, _):
        for name in ("servicemonitors", "podmonitors"):
            api.kubectl.apply((CRDS / f"{name}.yaml").read_text())
            api.kubectl.run("wait", "--for=condition=Established", f"crd/{name}.monitoring.coreos.com", "--timeout=30s")
        yield api


def dry(api: Cluster, thing: Json) -> None:
    """Have the API server check an object strictly."""
    api.kubectl.within("kvshare-system").run(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(thing)
    )


@pytest.mark.parametrize("namespaces", [[], ["a", "b"]], ids=["everywhere", "two namespaces"])
def test_monitors_fit_the_definitions(prometheus: Cluster, namespaces: list[str]) -> None:
    """Strict validation by the API server; a field that does not exist is noticed."""
    objects = rendered(values={**ALL, "watchNamespaces": namespaces})
    monitors = [thing for thing in objects if thing["kind"].endswith("Monitor")]
    assert len(monitors) == 3
    for thing in monitors:
        dry(prometheus, thing)
        assert thing["metadata"]["labels"]["release"] == "p"
    with pytest.raises(KubectlError, match="endpoint"):
        dry(prometheus, {**monitors[0], "spec": {**monitors[0]["spec"], "endpoint": []}})


def test_service_monitor_finds_a_service_that_finds_both_processes() -> None:
    """Labels and port names fit all the way; other Services of the chart are not scraped."""
    objects = rendered(values=ALL)
    monitor = one(objects, "ServiceMonitor", "kvshare-metrics")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    (service,) = [
        thing for thing in objects if thing["kind"] == "Service" and wanted <= thing["metadata"]["labels"].items()
    ]
    assert {port["name"] for port in service["spec"]["ports"]} == {end["port"] for end in monitor["endpoints"]}
    for process in ("controller", "webhook"):
        pod = one(objects, "Deployment", f"kvshare-{process}")["spec"]["template"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ports = [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
        assert service["spec"]["ports"][0]["targetPort"] in ports


def test_member_monitor_selects_injected_pods_where_the_operator_works() -> None:
    """By the label that the webhook writes; the pool becomes a label of the series."""
    members = one(rendered(values=ALL), "PodMonitor", "kvshare-members")["spec"]
    assert members["namespaceSelector"] == {"any": True}
    assert members["selector"]["matchExpressions"] == [{"key": names.MEMBER, "operator": "Exists"}]
    assert members["podTargetLabels"] == [names.MEMBER]
    assert [end["port"] for end in members["podMetricsEndpoints"]] == ["api"]
    some = one(rendered(values={**ALL, "watchNamespaces": ["a", "b"]}), "PodMonitor", "kvshare-members")["spec"]
    assert some["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_no_monitor_and_no_metrics_service_is_rendered_unasked() -> None:
    """A cluster without Prometheus' operator installs the chart as it is."""
    objects = rendered()
    assert not {kind for kind in kinds(objects) if kind.endswith("Monitor")}
    assert [thing["metadata"]["name"] for thing in objects if thing["kind"] == "Service"] == ["kvshare-webhook"]
