"""The report as a table for people."""

from rich.console import Console
from rich.table import Table

from testbed.demo.report import Report


def show(report: Report, console: Console) -> None:
    """Print one line for each row, and beside a wrong one what was expected."""
    table = Table(title="One cache, several tensor-parallel sizes and layouts", title_justify="left")
    for heading in ("step", "engine", "TP", "layout", "cached / prompt", "tokens match", "failed keys", ""):
        numeric = heading in ("TP", "cached / prompt", "failed keys")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=heading != "step")
    for row in report.rows:
        verdict = "right" if row.right else f"WRONG: {row.expected_cached} cached, a match, 0 failed expected"
        table.add_row(
            row.step,
            row.engine,
            str(row.tp),
            row.layout,
            f"{row.cached_tokens} / {row.prompt_tokens}",
            "yes" if row.tokens_match else "NO",
            str(row.failed_keys),
            verdict,
            style=None if row.right else "red",
        )
    console.print(table)
