"""What a store holds as a table for people; plain text when it is piped."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvshare_operator.core.store.leftovers import Row

_PIPED_WIDTH = 200
_SHOWN = 18
"""Characters of a fingerprint: the letter and what a pool's status shows."""
_STATES = {"inUse": "in use", "old": "[yellow]old[/]", "doubtful": "[yellow]doubtful[/]"}


def print_rows(
    rows: Sequence[Row], sizes: Sequence[int | None], foreign: int, where: str, console: Console | None = None
) -> None:
    """Print to standard output."""
    out = console or Console(soft_wrap=True)
    if not out.is_terminal:
        out.width = _PIPED_WIDTH
    out.print(f"Keys from {escape(where)}; {foreign} key(s) are not KVShare's and are left alone.")
    if not rows:
        out.print("No cached blocks.")
        return
    table = Table("prefix", "pool", "generation", "fingerprint", "objects", "bytes", "state", "why")
    for row, size in zip(rows, sizes, strict=True):
        group = row.group
        table.add_row(
            group.prefix, row.pool or "-", str(row.generation), group.fingerprint[:_SHOWN], str(group.objects),
            sized(size), _STATES[row.state], escape(row.message),
        )  # fmt: skip
    out.print(table)


def sized(size: int | None) -> str:
    """Return bytes for people."""
    if size is None:
        return "unknown"
    number, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.0f} {units[0]}" if number >= 10 or units[0] == "B" else f"{number:.1f} {units[0]}"
