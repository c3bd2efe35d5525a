"""reference/metrics.md: the connector's table, read without importing vLLM, and the operator's registry."""

import ast

from generator.source import assigned, cell, tree
from kvshare_operator.edges.metrics import REGISTRY

STATS = "connector/kvshare_connector/stats.py"
ENGINE = """# Metrics

## Engines

On vLLM's own `/metrics`, with vLLM's labels (`model_name`, `engine`) besides the ones named here. All are counters
except `kvshare_member_info`. A hit rate close to zero with `verdict="shared"` everywhere means that fingerprints or
namespaces differ: compare these two labels between members.

| Metric | Labels | Meaning |
|---|---|---|
"""
OPERATOR = """
## Operator

On port 8080 of controller and webhook (`/metrics`).

| Metric | Type | Labels | Meaning |
|---|---|---|---|
"""


def page() -> str:
    """All metrics."""
    module = tree(STATS)
    table: dict[str, tuple[dict[str, str], str]] = ast.literal_eval(assigned(module, "TABLE"))
    shared: dict[str, str] = ast.literal_eval(assigned(module, "SHARED_METRICS"))
    rows: dict[str, tuple[list[str], str]] = {}
    for name, (labels, text) in table.items():
        shown, _ = rows.setdefault(f"kvshare_{shared.get(name, name)}_total", ([], text))
        shown.extend(f'`{label}="{value}"`' for label, value in labels.items())
    lines = [f"| `{name}` | {', '.join(labels)} | {cell(text)} |\n" for name, (labels, text) in rows.items()]
    info = ", ".join(f"`{label}`" for label in ast.literal_eval(assigned(module, "MEMBER_LABELS")))
    text = "What this engine does with the shared cache, and why; 1 for the present state, 0 for former ones."
    lines.append(f"| `kvshare_member_info` | {info} | {text} |\n")
    return ENGINE + "".join(lines) + OPERATOR + "".join(_operator_rows())


def _operator_rows() -> list[str]:
    rows = []
    for collector in getattr(REGISTRY, "_collector_to_names"):  # noqa: B009 - labels are not public otherwise
        (family,) = collector.describe()
        labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames"))  # noqa: B009
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {labels} | {cell(family.documentation)} |\n")
    return sorted(rows)
