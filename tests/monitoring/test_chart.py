"""What the chart renders for Grafana and Prometheus, and that it renders none of it unasked."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

import pages
from pods import Json
from testbed.prepare.go_programs import program

pytestmark = pytest.mark.apiserver
CHART = pages.ROOT / "charts" / "kvshare"


def rendered(*sets: str) -> list[Json]:
    """Every object of the chart."""
    options = [word for value in sets for word in ("--set", value)]
    command = [str(program("helm")), "template", "kvshare", str(CHART), "--namespace", "kvshare-system", *options]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return [one for one in yaml.safe_load_all(finished.stdout) if one]


def test_nothing_is_rendered_unasked() -> None:
    """A cluster without the Prometheus operator installs the chart as it is."""
    kinds = {one["kind"] for one in rendered()}
    assert not kinds & {"ConfigMap", "PrometheusRule", "PodMonitor"}


def test_the_dashboard_arrives_unchanged() -> None:
    """Helm must not touch Grafana's own templates; labels and namespace are the reader's."""
    objects = rendered(
        "monitoring.dashboard.enabled=true", "monitoring.dashboard.namespace=monitoring",
        "monitoring.dashboard.labels.team=x",
    )  # fmt: skip
    (found,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert (found["metadata"]["namespace"], found["metadata"]["name"]) == ("monitoring", "kvshare-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["labels"]["team"] == "x"
    assert json.loads(found["data"]["kvshare.json"]) == json.loads((CHART / "dashboards" / "kvshare.json").read_text())


def test_the_dashboard_may_have_no_label_of_ours() -> None:
    """`labels: {grafana_dashboard: null}`, where a sidecar looks for something else."""
    objects = rendered("monitoring.dashboard.enabled=true", "monitoring.dashboard.labels.grafana_dashboard=null")
    (found,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert "grafana_dashboard" not in found["metadata"]["labels"]


def test_the_alerts_arrive_unchanged() -> None:
    """With the labels by which a Prometheus chooses its rules."""
    (found,) = [
        one
        for one in rendered("monitoring.alerts.enabled=true", "monitoring.alerts.labels.release=p")
        if one["kind"] == "PrometheusRule"
    ]
    assert found["metadata"]["labels"]["release"] == "p"
    assert found["spec"] == yaml.safe_load((CHART / "dashboards" / "alerts.yaml").read_text())


def test_the_pod_monitor_selects_the_operators_pods() -> None:
    """By the labels of both Deployments, on a port that both have."""
    objects = rendered("monitoring.podMonitor.enabled=true")
    (monitor,) = [one for one in objects if one["kind"] == "PodMonitor"]
    deployments = [one for one in objects if one["kind"] == "Deployment"]
    assert len(deployments) == 2
    for deployment in deployments:
        template = deployment["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for one in template["spec"]["containers"] for port in one["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
