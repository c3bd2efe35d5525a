"""`kvshare`: the command line of people. One file for each command; here they are only joined."""

from __future__ import annotations

from typing import Annotated

import typer

from kvshare_operator.cli import check, inject, must_gather, plan, purge
from kvshare_operator.cli.version import own_version

app = typer.Typer(
    name="kvshare",
    help="One KV cache for vLLM deployments with different tensor-parallel sizes and KV-cache layouts.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvshare {own_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """One KV cache for vLLM deployments with different tensor-parallel sizes and KV-cache layouts."""


app.command("plan")(plan.plan)
app.command("inject")(inject.inject)
app.command("check")(check.check)
app.command("must-gather")(must_gather.must_gather)
app.command("purge")(purge.purge)


def main() -> None:
    """Run the command line. Exit codes: 0 good, 1 refused or inconsistent, 2 usage, 3 unreachable."""
    app()
