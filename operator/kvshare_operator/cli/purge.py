"""`kvshare purge`: what a store still holds for nobody; lists it, and deletes it when told."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvshare_operator.cli import check
from kvshare_operator.cli.check_reading import CannotReadError, NotInstalledError
from kvshare_operator.cli.purge_tables import print_rows
from kvshare_operator.cli.usage import with_examples
from kvshare_operator.core.store.leftovers import Row, group_keys, judge, pattern

if TYPE_CHECKING:
    from kvshare_operator.cli.purge_reading import Master, Refers
    from kvshare_operator.edges.cluster_api import ClusterApi

_EXAMPLES = """
Examples:

  kvshare purge -n inference

  kvshare purge -n inference --pool llama-70b --delete

  kubectl -n stores port-forward deployment/mooncake-master 9003 50051 &

  kvshare purge --master-http http://127.0.0.1:9003 --master 127.0.0.1:50051 --delete --yes
"""


class Output(enum.StrEnum):
    """How to print."""

    table = "table"
    json = "json"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the user asked for; ``namespace`` is empty for all."""

    namespace: str
    pool: str | None
    master: str | None
    master_http: str | None
    http_port: int
    prefixes: tuple[str, ...]
    delete: bool
    yes: bool
    output: Output


@dataclasses.dataclass
class Found:
    """One look: the store, its judged rows, and what was done.

    Attributes:
        address: the master's address for clients; empty when it is not known.
        sizes: bytes by row; None where they are not known, and when deleting.
        foreign: keys that are not of our grammar.
        removed: objects that went, by prefix.
        commands: what would delete from inside the cluster.
    """

    pool: str
    address: str
    master: Master
    refers: Refers
    rows: tuple[Row, ...]
    sizes: tuple[int | None, ...]
    foreign: int
    removed: dict[str, int] = dataclasses.field(default_factory=dict)
    commands: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON."""
        return {
            "master": self.address or None,
            "keysFrom": self.master.where,
            "rows": [
                {
                    "prefix": row.group.prefix, "fingerprint": row.group.fingerprint, "pool": row.pool or None,
                    "generation": row.generation, "objects": row.group.objects, "bytes": size, "state": row.state,
                    "reason": row.reason, "message": row.message,
                }
                for row, size in zip(self.rows, self.sizes, strict=True)
            ],
            "otherKeys": self.foreign,
            "doubts": list(self.refers.doubts),
            "removed": self.removed,
            "commands": self.commands,
        }  # fmt: skip


@with_examples(_EXAMPLES)
def purge(
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", help="Default: the namespace of the current context.")
    ] = None,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Choose among all pools.")] = False,
    pool: Annotated[str | None, typer.Option("--pool", help="The pool whose store is looked at.")] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the master for clients. Default: the pool's.")
    ] = None,
    master_http: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The master's HTTP port. Default: its pod's, through the API server."),
    ] = None,
    http_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the master's HTTP in its pod, without --master-http.")
    ] = 9003,
    prefix: Annotated[
        list[str] | None,
        typer.Option(metavar="kvs1/p-NAME/gN", help="Delete only this prefix; may be one that no pool here has."),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is old, after a question.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Without the question.")] = False,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="table for people, json for programs.")
    ] = Output.table,
) -> None:
    """List what a store holds and no pool refers to any more; delete it with --delete.

    Old is a generation of a pool of this cluster below the pool's, which no pod was given or has reported.
    Prefixes of no pool are shown and kept, unless they are named by --prefix: another cluster may use them.
    Nothing is deleted while a pool or its pods cannot be read, and never what somebody is just reading.
    Deleting needs Mooncake where this runs; where it is missing, the command for a pod of the cluster is printed.

    Exit code 0: good; 1: something could not be deleted; 2: wrong usage; 3: no cluster answers, or no store.
    """
    if namespace is not None and everywhere:
        raise typer.BadParameter("-n and -A exclude each other: one namespace, or all")
    if (prefix or yes) and not delete:
        raise typer.BadParameter("--prefix and --yes say how to delete: give --delete as well")
    if delete and not yes and not asked():
        raise typer.BadParameter("nobody can be asked here: give --yes to delete without a question")
    named = tuple(prefix or ())

    def wanted(home: str) -> Wanted:
        where = "" if everywhere else namespace or home
        return Wanted(where, pool, master, master_http, http_port, named, delete, yes, output)

    found, good = asyncio.run(_run(wanted))
    if output is Output.json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    for text in found.refers.doubts:
        typer.echo(text, err=True)
    if not good:
        raise typer.Exit(1)


def asked() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


async def _run(options: Callable[[str], Wanted]) -> tuple[Found, bool]:
    api, close, home = check.connect()
    wanted = options(home)
    try:
        found = await look(api, wanted, home)
        if wanted.output is Output.table:
            print_rows(found.rows, found.sizes, found.foreign, found.master.where)
        return found, not wanted.delete or await _delete(api, wanted, home, found)
    except NotInstalledError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except CannotReadError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(3) from error
    finally:
        await close()


async def look(api: ClusterApi, wanted: Wanted, home: str) -> Found:
    """Read cluster and store once, and judge. Raises CannotReadError, NotInstalledError, and typer's usage errors."""
    from kvshare_operator.cli.purge_reading import Master, master_behind, read_references

    home = wanted.namespace or home
    pool, address = _store(wanted, (await read_references(api, home)).stores)
    if wanted.master_http:
        master = Master(api, url=wanted.master_http)
    else:
        master = await master_behind(api, address, wanted.http_port)
    groups, foreign = group_keys(await master.keys())
    # Who refers to keys is read after them: whoever wrote a key that is seen here had been given its prefix before.
    refers = await read_references(api, home)
    rows = judge(groups, refers.pools, refers.others)
    # Asking for an object's size is a read to Mooncake: its lease would keep the object from being deleted.
    sizes = tuple([None if wanted.delete else await master.size(row.group) for row in rows])
    return Found(pool, wanted.master or address, master, refers, rows, sizes, foreign)


def _store(wanted: Wanted, stores: Mapping[str, str]) -> tuple[str, str]:
    """Return a pool of the store that is meant, and the master's address; both empty when only an URL is known."""
    chosen = {
        name: address
        for name, address in sorted(stores.items())
        if wanted.namespace in ("", name.partition("/")[0]) and wanted.pool in (None, name.partition("/")[2])
    }
    addresses = sorted(set(chosen.values()))
    if len(addresses) == 1:
        return next(iter(chosen)), addresses[0]
    if wanted.master_http and wanted.pool is None:
        return "", ""
    if addresses:
        raise typer.BadParameter(f"stores at {', '.join(addresses)} given, one expected: choose it with --pool and -n")
    raise typer.BadParameter(
        f"no pool {wanted.pool or ''} with a store in {wanted.namespace or 'any namespace'}: choose one with --pool "
        "and -n, or give the store's --master-http"
    )


async def _delete(api: ClusterApi, wanted: Wanted, home: str, found: Found) -> bool:
    """Delete; return whether everything that was chosen is gone. Words go to standard error."""
    chosen = choose(found.rows, wanted.prefixes)
    if found.refers.doubts:
        typer.echo("Nothing is deleted while this is so:", err=True)
        return False
    if not chosen:
        typer.echo("Nothing is old.", err=True)
        return True
    objects = sum(row.group.objects for row in found.rows if row.group.prefix in chosen)
    if not wanted.yes and not typer.confirm(f"Delete {objects} objects of {', '.join(chosen)}?", err=True):
        return False
    # While the user thought about it, a pool may have come to refer to one of them.
    again = await look(api, wanted, home)
    chosen = [prefix for prefix in chosen if prefix in choose(again.rows, wanted.prefixes)]
    if again.refers.doubts or not chosen:
        typer.echo("Nothing is deleted: pools or pods changed meanwhile.", err=True)
        return False
    return await _remove(found, chosen, wanted)


def choose(rows: tuple[Row, ...], named: tuple[str, ...]) -> list[str]:
    """Return the prefixes to delete: all that are old, or those that are named.

    Raises typer.BadParameter for a named one that is in use, or not in the store.
    """
    states = {row.group.prefix: row for row in rows}
    mistakes = [
        f"{prefix} is not in the store" if prefix not in states else f"{prefix}: {states[prefix].message}"
        for prefix in named
        if prefix not in states or states[prefix].state == "inUse"
    ]
    if mistakes:
        raise typer.BadParameter("; ".join(mistakes), param_hint="--prefix")
    return sorted(set(named)) if named else sorted({row.group.prefix for row in rows if row.state == "old"})


async def _remove(found: Found, chosen: list[str], wanted: Wanted) -> bool:
    from kvshare_operator.cli import purge_removing

    patterns = [pattern(prefix) for prefix in chosen]
    try:
        if not found.address:
            raise purge_removing.CannotRemoveError("the master's address is not known: give --master")
        counts = await asyncio.to_thread(purge_removing.remove_here, found.address, patterns)
    except purge_removing.CannotRemoveError as error:
        typer.echo(f"Nothing was deleted: {error}.", err=True)
        place = purge_removing.place_for(found.pool, found.address, found.refers.members)
        if place is None:
            typer.echo("Run this where Mooncake is installed and the master can be reached.", err=True)
        else:
            found.commands = [purge_removing.command(place, found.address, patterns)]
            typer.echo("From inside the cluster, this deletes it:", err=True)
            if wanted.output is Output.table:
                typer.echo(found.commands[0])
        return False
    found.removed = dict(zip(chosen, counts, strict=True))
    groups, _ = group_keys(await found.master.keys())
    left = sum(group.objects for group in groups if group.prefix in chosen)
    for prefix, count in found.removed.items():
        typer.echo(f"{prefix}: {count} objects deleted", err=True)
    if left:
        typer.echo(
            f"{left} objects are left: somebody has read, written or listed them within the master's lease, a few "
            "seconds. If it was this command, try again; if not, find out who it is.", err=True,
        )  # fmt: skip
    return not left
