"""Dashboard and alerts ask for metrics and labels that exist, and every alert is explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

import pages
from kvshare_connector import counters
from kvshare_operator.edges.metrics import REGISTRY

DASHBOARDS = pages.ROOT / "charts" / "kvshare" / "dashboards"
ALERTS = [
    rule for group in yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD = json.loads((DASHBOARDS / "kvshare.json").read_text())
PAGE = (pages.ROOT / "docs" / "howto" / "monitoring.md").read_text()
SCRAPED = {"namespace", "pod"}
"""Labels that Prometheus adds; queries may rely on no others."""
ENGINE = {"model_name", "engine"}
"""Labels that vLLM gives to every metric of a connector."""


def exported() -> dict[str, set[str]]:
    """Every series that an engine or the operator exports, with its own labels."""
    found = {f"kvshare_{name}_total": {*labels, *ENGINE} for name, (labels, _) in counters.COUNTERS.items()}
    found |= {f"kvshare_{name}": set(ENGINE) for name in counters.GAUGES}
    for name in counters.HISTOGRAMS:
        found |= {f"kvshare_{name}_{part}": {*ENGINE, "le"} for part in ("bucket", "sum", "count")}
    found["kvshare_member_info"] = {*counters.MEMBER_LABELS, *ENGINE}
    for collector in getattr(REGISTRY, "_collector_to_names"):  # noqa: B009 - labels are not public otherwise
        (family,) = collector.describe()
        labels = set(getattr(collector, "_labelnames"))  # noqa: B009
        if family.type == "histogram":
            found |= {f"{family.name}_{part}": {*labels, "le"} for part in ("bucket", "sum", "count")}
        else:
            found[f"{family.name}_total" if family.type == "counter" else family.name] = labels
    return found


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of panels and alerts."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]


QUERIES = [pytest.param(query, id=f"{where}: {query[:50]}") for where, query in queries()]


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    """All selectors of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for field in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(node, field, None)
        if inner is not None and not isinstance(inner, str):
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


def _without_matchers(query: str) -> str:
    return re.sub(r"\{[^}]*\}", "", query)


@pytest.mark.parametrize("query", QUERIES)
def test_metrics_and_labels_of_a_query_exist(query: str) -> None:
    """Parsed as Prometheus would; every name is exported, every matched or grouped label is there."""
    known = exported()
    found = list(selectors(promql_parser.parse(query)))
    assert found
    labels: set[str] = set()
    for selector in found:
        assert selector.name in known, f"nobody exports {selector.name}"
        labels |= known[selector.name] | SCRAPED
        for matcher in selector.matchers.matchers:
            assert matcher.name in known[selector.name] | SCRAPED, (selector.name, matcher.name)
    replaced = re.findall(r'label_replace\([^"]*,\s*"(\w+)",\s*"[^"]*",\s*"(\w+)"', _without_matchers(query))
    for made, source in replaced:
        # Prometheus calls a label of ours so that the target has too.
        assert source.removeprefix("exported_") in labels
        labels.add(made)
    for grouped in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in grouped.split(",")} <= labels


def test_codes_and_verdicts_that_alerts_name_exist() -> None:
    """A renamed code would silence an alert without anybody noticing."""
    from kvshare_connector.store.codes import CODES, Reaction
    from kvshare_operator.api.status import Members

    ours = {counters.SHORT_READ, counters.NO_CLIENT, counters.OVERDUE, counters.RAISED}
    known = {code.name for code in CODES.values()} | ours
    named = set()
    for rule in ALERTS:
        for value in re.findall(r'code[!=]~"([^"]+)"', rule["expr"]):
            named |= set(value.split("|"))
        for value in re.findall(r'verdict=~"([^"]+)"', rule["expr"]):
            assert set(value.split("|")) <= set(Members.model_fields)
    assert named
    assert named <= known
    (table,) = re.findall(r"### KVShareTransfersFail\n(.*?)\n###", PAGE, re.DOTALL)
    explained = {
        code for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)
    }
    assert explained <= known
    users = {code.name for code in CODES.values() if code.reaction is Reaction.USER}
    assert users | ours - {counters.NO_CLIENT} | {"CHECKSUM_MISMATCH"} <= explained, "codes that somebody must act on"


def test_every_alert_has_a_section_that_says_what_to_do() -> None:
    """From an alert to its cause: the page has each, in the same order, and no other."""
    assert re.findall(r"^### (KVShare\w+)$", PAGE, re.MULTILINE) == [rule["alert"] for rule in ALERTS]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_say_what_and_what_it_means(rule: dict[str, Any]) -> None:
    """Severity, what is affected, description, section of the page; templates use labels that the query keeps."""
    assert rule["labels"]["severity"] in ("info", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    section = f"docs/howto/monitoring.md#{rule['alert'].lower()}"
    assert rule["annotations"]["runbook_url"] == f"https://github.com/kvshare/kvshare/blob/main/{section}"
    kept = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for label in group.split(",")}
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert used <= kept


def test_panels_do_not_overlap() -> None:
    """Each cell of Grafana's 24 columns belongs to one panel."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_tells_its_story_in_order() -> None:
    """The page has the same rows."""
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == re.findall(r"^\| ([A-Z][^|]*\?) \|", PAGE, re.MULTILINE)


def test_metrics_that_pages_name_exist() -> None:
    """Every page but records of the past; modules and files of ours have similar names and are none."""
    known = {*exported(), *(re.sub(r"_(bucket|sum|count)$", "", name) for name in exported())}
    modules = ("kvshare_layout", "kvshare_connector", "kvshare_operator", "kvshare_testbed")
    for page in pages.PAGES:
        if page.parent.name == "design":
            continue
        for name in set(re.findall(r"\bkvshare_[a-z_]+[a-z]\b", page.read_text())):
            if not name.startswith(modules) or name.startswith("kvshare_operator_"):
                assert name in known, f"{page.name}: nobody exports {name}"
