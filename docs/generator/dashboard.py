"""charts/kvshare/dashboards/kvshare.json, from the table of panels beside this file.

The dashboard answers, from top to bottom: does it help, who shares, is the store well, how much moves, what does it
cost the engine, is the operator well. What it says is in the table; here is only how Grafana draws it.
"""

import json
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_suffix(".yaml")
MODELS = 'model_name=~"$model"'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHT, WIDTH = 8, 8
HIDDEN = ("Time", "Value", "__name__", "container", "endpoint", "instance", "job", "prometheus")


def text() -> str:
    """The dashboard as Grafana imports it."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard as a value."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in yaml.safe_load(TABLE.read_text()):
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row["row"], "panels": [], "gridPos": place})
        x, y = 0, y + 1
        for panel in row["panels"]:
            width = panel.get("width", WIDTH)
            place = {"x": x, "y": y, "w": width, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_drawn(panel)})
            x += width
        y += HEIGHT
    return {
        "uid": "kvshare",
        "title": "KVShare",
        "description": "One KV cache for several vLLM deployments: does it help, who shares, is the store well.",
        "tags": ["kvshare", "vllm"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source(), _model()]},
        "panels": panels,
    }


def _drawn(panel: dict[str, Any]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    instant = kind == "table"
    targets = []
    for number, (legend, query) in enumerate(panel["queries"].items()):
        target = {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": query.replace("{M}", f"{{{MODELS}}}").replace("{M,", f"{{{MODELS},"),
            "legendFormat": legend or "__auto",
            "instant": instant,
            "range": not instant,
        }
        targets.append({**target, "format": "table"} if instant else target)
    defaults: dict[str, Any] = {"unit": panel.get("unit", "short"), "min": 0, "custom": {}}
    if panel.get("stacked"):
        defaults["custom"] = {"fillOpacity": 30, "stacking": {"mode": "normal"}}
    out: dict[str, Any] = {
        "type": kind,
        "title": panel["title"],
        "description": panel["help"],
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
    if instant:
        out["transformations"] = [{"id": "organize", "options": {"excludeByName": dict.fromkeys(HIDDEN, True)}}]
    return out


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _model() -> dict[str, Any]:
    query = "label_values(kvshare_member_info, model_name)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "models"},
    }
