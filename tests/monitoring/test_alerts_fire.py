"""Every alert of the chart, evaluated by Prometheus' own program: it fires when it must, and only then."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import pages
from alert_cases import CASES, HEALTHY, Case
from testbed.prepare.go_programs import program

pytestmark = pytest.mark.apiserver
RULES = pages.ROOT / "charts" / "kvshare" / "dashboards" / "alerts.yaml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def evaluate(folder: Path, series: dict[str, str], expected: list[dict[str, Any]]) -> None:
    """Let promtool compare what fires with what must."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": expected,
    }
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    ran = subprocess.run([program("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def firing(folder: Path, case: Case, minute: int) -> str:
    """What promtool says that fires, when it is told that nothing does."""
    with pytest.raises(AssertionError) as found:
        evaluate(folder, case.series, [{"eval_time": f"{minute}m", "alertname": case.alert}])
    return str(found.value)


def test_rules_are_what_prometheus_reads() -> None:
    """Its own checker has nothing to say."""
    ran = subprocess.run(
        [program("promtool"), "check", "rules", "--lint=all", "--lint-fatal", RULES],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_healthy_fleet_is_quiet(tmp_path: Path) -> None:
    """Some keys are always missing; nobody is woken for it."""
    evaluate(
        tmp_path, HEALTHY,
        [{"eval_time": f"{minute}m", "alertname": alert} for alert in ALERTS for minute in (20, 120, 239)],
    )  # fmt: skip


def test_every_alert_has_a_case() -> None:
    """A new alert is tried before it is shipped."""
    assert {case.alert for case in CASES} == set(ALERTS)


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.alert}-{n}") for n, case in enumerate(CASES)])
def test_an_alert_fires_after_its_time_and_names_where_to_look(tmp_path: Path, case: Case) -> None:
    """Quiet before the fault; later it fires, with labels and a summary that lead to the engine or pool."""
    if case.quiet is not None:
        evaluate(tmp_path, case.series, [{"eval_time": f"{case.quiet}m", "alertname": case.alert}])
    said = firing(tmp_path, case, case.at)
    assert case.words in said
    assert all(f'{name}="{value}"' in said for name, value in case.labels.items())
