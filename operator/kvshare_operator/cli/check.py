"""`kvshare check`: does this installation inject, and do its members share? Only reads, and one dry run a pool."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvshare_operator.api.reasons import refusal
from kvshare_operator.cli.check_findings import Findings, judge
from kvshare_operator.cli.check_reading import CannotReadError, NotInstalledError, Seen, read_cluster
from kvshare_operator.cli.check_tables import print_findings
from kvshare_operator.cli.usage import with_examples

if TYPE_CHECKING:
    from kvshare_operator.edges.cluster_api import ClusterApi

_PAUSE_SECONDS = 2.0
_UNITS = {"s": 1, "m": 60, "h": 3600}
_EXAMPLES = """
Examples:

  kvshare check -n inference

  kvshare check -A -o json | jq '.pools[] | select(.owners[].state != "shared")'

  kubectl rollout restart deployment/decode && kvshare check --pool llama-70b --wait 5m
"""


class Output(enum.StrEnum):
    """How to print."""

    table = "table"
    json = "json"


@with_examples(_EXAMPLES)
def check(
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", help="Default: the namespace of the current context.")
    ] = None,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Pools of all namespaces.")] = False,
    pool: Annotated[str | None, typer.Option("--pool", help="One pool only.")] = None,
    wait: Annotated[
        str | None, typer.Option(metavar="5m", help="Until everything is good and every member has reported.")
    ] = None,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="table for people, json for programs.")
    ] = Output.table,
) -> None:
    """Check pools, members and webhook of a cluster, through KUBECONFIG or the pod's service account.

    Shows each owner of pods with its state, reason, remedy and restart command, the fields in which members
    differ, each pool's store as the operator sees it, versions, whether the webhook injects a dry-run pod, and
    when its certificate ends.

    Exit code 0: good; 1: something does not share or does not inject; 2: wrong usage; 3: no cluster answers.
    Members that have not reported yet are good without --wait, and what --wait waits for.
    """
    if namespace is not None and everywhere:
        raise typer.BadParameter("-n and -A exclude each other: one namespace, or all")
    patience = _seconds(wait)
    found = asyncio.run(_run(namespace, everywhere, pool, patience))
    if output is Output.json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        print_findings(found)
    for text in (*found.problems, *found.notes):
        typer.echo(text, err=True)
    if not (found.settled if wait else found.good):
        raise typer.Exit(1)


def _seconds(text: str | None) -> float:
    if text is None:
        return 0.0
    match = re.fullmatch(r"(\d{1,6})([smh])", text)
    if not match:
        raise typer.BadParameter(f"{text!r} given, 90s, 5m or 1h expected", param_hint="--wait")
    return float(int(match[1]) * _UNITS[match[2]])


async def _run(namespace: str | None, everywhere: bool, pool: str | None, patience: float) -> Findings:
    api, close, home = connect()
    where = None if everywhere else namespace or home

    async def look() -> Findings:
        seen = await read_cluster(api, where, pool)
        return judge(_complete(seen, where, pool), expiry(seen.certificate), now(), qualified=everywhere)

    try:
        return await settle(look, patience)
    except CannotReadError as error:
        typer.echo(
            f"{error}. Check KUBECONFIG, the network and your permissions (get, list on kvsharepools).", err=True
        )
        raise typer.Exit(3) from error
    except NotInstalledError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    finally:
        await close()


def _complete(seen: Seen, where: str | None, pool: str | None) -> Seen:
    """A pool that was named must exist."""
    if pool is not None and not seen.pools:
        missing = refusal("PoolNotFound", pool=pool, namespace=where or "any")
        typer.echo(missing.sentence(), err=True)
        raise typer.Exit(1)
    return seen


async def settle(look: Callable[[], Awaitable[Findings]], patience: float) -> Findings:
    """Look until everything is good and reported, or patience (seconds) is over; at least once."""
    end = time.monotonic() + patience
    errors = Console(stderr=True)
    found = await look()
    if found.settled or not patience:
        return found
    with errors.status("waiting") if errors.is_terminal else _Silent():
        while not found.settled and time.monotonic() < end:
            await asyncio.sleep(min(_PAUSE_SECONDS, max(0.0, end - time.monotonic())))
            found = await look()
    return found


class _Silent:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def now() -> datetime.datetime:
    """Return the time, with zone."""
    return datetime.datetime.now(datetime.UTC)


def expiry(certificate: str | None) -> datetime.datetime | None:
    """Return when a PEM certificate ends; None for none, or for one that cannot be read."""
    from kvshare_operator.core.certificates import expires

    try:
        return expires(certificate) if certificate else None
    except ValueError:
        return None


def connect() -> tuple[ClusterApi, Callable[[], Awaitable[None]], str]:
    """Return the API, how to close it, and the namespace of the current context.

    Imported here, so that `plan` and `inject` work without any cluster package.
    """
    try:
        from kvshare_operator.edges.cluster_api import HttpClusterApi, context_namespace
    except ImportError as error:
        typer.echo(
            f"{error.name} is not installed: install KVShare with its extra `check`: pip install '.[check]'", err=True
        )
        raise typer.Exit(2) from error
    api = HttpClusterApi()
    return api, api.close, context_namespace()
