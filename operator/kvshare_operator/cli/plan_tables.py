"""A plan as a picture and tables for people; plain text when it is piped."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvshare_operator.cli.plan_drawing import drawing_of, span
from kvshare_operator.cli.plan_terminal import print_drawing
from kvshare_operator.core.pool.plan import Plan


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan to standard output."""
    out = console or Console(soft_wrap=True)
    if plan.store_tp is not None:
        out.print(f"Store TP [bold]{plan.store_tp}[/] ({plan.source})")
    if plan.cache_namespace is not None:
        out.print(f"Cache namespace {plan.cache_namespace}")
    if plan.cache_split:
        out.print("[yellow]New pods would start with an empty cache; running pods keep the old one.[/]")
    drawing = drawing_of(plan)
    if drawing is not None and not print_drawing(drawing, out):
        out.print("This line is too short for a picture of all shards: -o svg has room.", style="dim")
    if plan.ranks:
        out.print(_ranks(plan))
    if plan.stages:
        table = Table("stage", "layers", title="Store stages", title_justify="left")
        for number, layers in plan.stages:
            table.add_row(str(number), span(layers))
        out.print(table)
    if plan.kinds:
        out.print(_kinds(plan))
    for problem in plan.problems:
        refused = problem.refusal
        out.print(f"[red]{refused.code}[/] {escape(problem.field)}: {escape(refused.message)} {escape(refused.remedy)}")


def _kinds(plan: Plan) -> Table:
    table = Table("name in keys", "rule", "layers", "stages", title="Kinds of caches", title_justify="left")
    for kind in plan.kinds:
        rule = kind.words if kind.cached else f"{kind.words}, not cached (SeveralKinds)"
        table.add_row(kind.name, rule, span(kind.layers), str(len(kind.stages)))
    return table


def _ranks(plan: Plan) -> Table:
    table = Table("TP", "rank", "KV heads", "shards", "replica", title="Who keeps what", title_justify="left")
    last = 0
    for row in plan.ranks:
        if last and row.tp != last:
            table.add_section()
        last = row.tp
        heads = span(row.kv_heads) if row.kv_heads else "not known"
        replica = f"{row.replica + 1} of {row.replicas}" if row.replicas > 1 else "-"
        table.add_row(str(row.tp), str(row.rank), heads, span(row.shards), replica)
    return table
