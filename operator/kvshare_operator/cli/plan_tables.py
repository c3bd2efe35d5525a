"""A plan as tables for people; plain text when it is piped."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvshare_operator.core.pool.plan import Plan

_WIDEST_LIST = 8


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan to standard output."""
    out = console or Console(soft_wrap=True)
    if plan.store_tp is not None:
        out.print(f"Store TP [bold]{plan.store_tp}[/] ({plan.source})")
    if plan.cache_namespace is not None:
        out.print(f"Cache namespace {plan.cache_namespace}")
    if plan.cache_split:
        out.print("[yellow]New pods would start with an empty cache; running pods keep the old one.[/]")
    if plan.ranks:
        out.print(_ranks(plan))
    if plan.stages:
        table = Table("stage", "layers", title="Store stages", title_justify="left")
        for number, layers in plan.stages:
            table.add_row(str(number), _span(layers))
        out.print(table)
    for problem in plan.problems:
        refused = problem.refusal
        out.print(f"[red]{refused.code}[/] {escape(problem.field)}: {escape(refused.message)} {escape(refused.remedy)}")


def _ranks(plan: Plan) -> Table:
    table = Table("TP", "rank", "KV heads", "shards", "replica", title="Who keeps what", title_justify="left")
    last = 0
    for row in plan.ranks:
        if last and row.tp != last:
            table.add_section()
        last = row.tp
        heads = _span(row.kv_heads) if row.kv_heads else "not known"
        replica = f"{row.replica + 1} of {row.replicas}" if row.replicas > 1 else "-"
        table.add_row(str(row.tp), str(row.rank), heads, _span(row.shards), replica)
    return table


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:_WIDEST_LIST]))
    return shown + (", ..." if len(numbers) > _WIDEST_LIST else "")
