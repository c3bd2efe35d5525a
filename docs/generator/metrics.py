"""reference/metrics.md: the connector's table, read without importing vLLM, and the operator's registry."""

import ast
from collections.abc import Sequence

from generator.source import assigned, cell, tree
from kvshare_operator.edges.metrics import REGISTRY

COUNTERS = "connector/kvshare_connector/counters.py"
ENGINE = """# Metrics

## Engines

On vLLM's own `/metrics`, with vLLM's labels (`model_name`, `engine`) besides the ones named here; data-parallel engines
of one process differ in `engine`. Counters are sums over all ranks of an engine. A hit rate
(`kvshare_hit_tokens_total` / `kvshare_asked_tokens_total`) close to zero with `verdict="shared"` everywhere means that
fingerprints or namespaces differ: compare these two labels between members.

The label `code` is one of the store's names, such as `OBJECT_NOT_FOUND`, or one of ours: `SHORT_READ` (another number
of bytes than the object has), `NO_CLIENT` (no connection to the store), `OVERDUE` (a load waited too long behind
others), `RAISED` (an error of ours, see the log).

| Metric | Type | Labels | Meaning |
|---|---|---|---|
"""
OPERATOR = """
## Operator

On port 8080 of controller and webhook (`/metrics`).

| Metric | Type | Labels | Meaning |
|---|---|---|---|
"""


def page() -> str:
    """All metrics."""
    module = tree(COUNTERS)
    counters: dict[str, tuple[tuple[str, ...], str]] = ast.literal_eval(assigned(module, "COUNTERS"))
    gauges: dict[str, str] = ast.literal_eval(assigned(module, "GAUGES"))
    histograms: dict[str, tuple[tuple[int, ...], str]] = ast.literal_eval(assigned(module, "HISTOGRAMS"))
    member: tuple[str, ...] = ast.literal_eval(assigned(module, "MEMBER_LABELS"))
    rows = [_row(f"{name}_total", "counter", labels, text) for name, (labels, text) in counters.items()]
    rows += [_row(name, "gauge", (), text) for name, text in gauges.items()]
    rows += [_row(name, "histogram", (), text) for name, (_, text) in histograms.items()]
    text = "What this engine does with the shared cache, and why; 1 for the present state, 0 for former ones."
    rows.append(_row("member_info", "gauge", member, text))
    return ENGINE + "".join(rows) + OPERATOR + "".join(_operator_rows())


def _row(name: str, kind: str, labels: Sequence[str], text: str) -> str:
    return f"| `kvshare_{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {cell(text)} |\n"


def _operator_rows() -> list[str]:
    rows = []
    for collector in getattr(REGISTRY, "_collector_to_names"):  # noqa: B009 - labels are not public otherwise
        (family,) = collector.describe()
        labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames"))  # noqa: B009
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {labels} | {cell(family.documentation)} |\n")
    return sorted(rows)
