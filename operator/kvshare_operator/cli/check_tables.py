"""Findings of a check as tables for people; plain text when it is piped."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvshare_operator.api.member_reasons import member_remedy
from kvshare_operator.cli.check_findings import GOOD, Findings, PoolRow

_PIPED_WIDTH = 160
_COUNTS = ("total", "shared", "isolated", "disabled", "unreported", "outdated", "notInjected")


def print_findings(found: Findings, console: Console | None = None) -> None:
    """Print to standard output."""
    out = console or Console(soft_wrap=True)
    if not out.is_terminal:
        out.width = _PIPED_WIDTH
    said = {True: "[green]injects[/]", False: "[red]does not inject[/]", None: "not tried"}[found.dry_run_injected]
    expires = found.certificate_expires
    out.print(f"Webhook: {said}; certificate until {f'{expires:%Y-%m-%d}' if expires else 'not known'}")
    if found.versions:
        out.print(f"Versions: {escape(', '.join(f'{name} {version}' for name, version in found.versions.items()))}")
    if not found.pools:
        out.print("No pools.")
        return
    table = Table("pool", "ready", "reason", *_COUNTS, title="Pools", title_justify="left")
    for pool in found.pools:
        counts = [str(pool.members.get(name, 0)) for name in _COUNTS]
        table.add_row(pool.name, pool.ready, pool.reason, *counts)
    out.print(table)
    for pool in found.pools:
        _print_pool(out, pool)


def _print_pool(out: Console, pool: PoolRow) -> None:
    if pool.ready != "True":
        out.print(f"[red]{escape(pool.name)}[/]: {escape(pool.message)}")
    if pool.store:
        out.print(f"{escape(pool.name)}: store: {escape(pool.store)}")
    if pool.versions:
        out.print(f"{escape(pool.name)}: versions: {escape(pool.versions)}")
    if len(pool.fingerprints) > 1:
        table = Table("fingerprint", "members", "differs in", title=f"{pool.name}: fingerprints", title_justify="left")
        for one in pool.fingerprints:
            fields = ", ".join(one.get("differingFields") or []) or "-"
            table.add_row(str(one.get("id")), str(one.get("members")), fields)
        out.print(table)
    if pool.owners:
        table = Table("owner", "pods", "state", "reason", title=f"{pool.name}: owners", title_justify="left")
        for owner in pool.owners:
            state = owner.state if owner.state in GOOD else f"[red]{owner.state}[/]"
            table.add_row(owner.name, str(owner.pods), state, owner.reason)
        out.print(table)
    for owner in pool.owners:
        if owner.state not in GOOD and owner.message:
            out.print(f"{escape(owner.name)}: {owner.reason}: {escape(owner.message)}")
            if owner.state in ("isolated", "disabled") and (remedy := member_remedy(owner.reason)):
                out.print(f"  {escape(remedy)}")
    commands = dict.fromkeys(owner.restart_command for owner in pool.owners if owner.restart_command)
    if commands:
        out.print("To restart, after what is named above is mended:")
    for command in commands:
        out.print(f"  {escape(command)}")
