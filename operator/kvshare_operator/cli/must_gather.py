"""`kvshare must-gather`: one archive with everything that support asks for, secrets masked. Only reads, besides the
check's dry run.
"""

from __future__ import annotations

import asyncio
import io
import json
import pathlib
import platform
import tarfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvshare_operator.cli import check
from kvshare_operator.cli.check_findings import judge
from kvshare_operator.cli.check_reading import CannotReadError, NotInstalledError, read_cluster
from kvshare_operator.cli.check_tables import print_findings
from kvshare_operator.cli.usage import with_examples
from kvshare_operator.cli.version import own_version

if TYPE_CHECKING:
    from kvshare_operator.cli.must_gather_reading import Gathering
    from kvshare_operator.edges.cluster_api import ClusterApi

_README = """\
An archive of `kvshare must-gather`, made {time}.

check.txt, check.json     pools, members, webhook and certificate, as `kvshare check` sees them
versions.json             this command, operator, cluster, Python; payload images and members' engines by pool
cluster-version.json      the API server
resource-definition.yaml  which versions of KVSharePool the cluster serves
webhook/, operator/       configuration, Deployments, pods, logs, events
pools/NAMESPACE/NAME/     the pool, its members, pods that were not injected, its managed store, events (also of denied
                          pods); of members' logs only lines about KVShare
missing.txt               what could not be read, and why

No Secret is in it. What looks like a secret in variables, arguments, addresses and logs is ***masked***.
Look through it before you send it to anybody.
"""
_EXAMPLES = """
Examples:

  kvshare must-gather -n inference

  kvshare must-gather -A -o /tmp/kvshare.tar.gz

  kvshare must-gather -n inference --pool llama-70b --log-lines 20000
"""


@with_examples(_EXAMPLES)
def must_gather(
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", help="Default: the namespace of the current context.")
    ] = None,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Pools of all namespaces.")] = False,
    pool: Annotated[str | None, typer.Option("--pool", help="One pool only.")] = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("-o", "--output", metavar="FILE.tar.gz", help="Default: kvshare-must-gather-TIME.tar.gz here."),
    ] = None,
    operator_namespace: Annotated[
        str, typer.Option(help="Where the operator runs. Default: what the webhook's configuration says.")
    ] = "",
    log_lines: Annotated[int, typer.Option(min=1, max=1_000_000, help="Last lines of each container's log.")] = 5000,
) -> None:
    """Write an archive with pools, members, events and logs for support; secrets are masked.

    Reads what you may read and notes what you may not. Changes nothing in the cluster.

    Exit code 0: the archive was written, even if something is missing in it; 2: wrong usage; 3: no cluster answers.
    """
    if namespace is not None and everywhere:
        raise typer.BadParameter("-n and -A exclude each other: one namespace, or all")
    time = check.now()
    target = output or pathlib.Path(f"kvshare-must-gather-{time:%Y%m%d-%H%M%S}.tar.gz")
    if target.exists():
        raise typer.BadParameter(f"{target} exists already: choose another name", param_hint="--output")
    if not target.parent.is_dir():
        raise typer.BadParameter(
            f"there is no folder {target.parent}: make it, or choose another", param_hint="--output"
        )
    files, missing = asyncio.run(_run(namespace, everywhere, pool, operator_namespace, log_lines))
    files["README.txt"] = _README.format(time=f"{time:%Y-%m-%d %H:%M:%S} UTC")
    files.setdefault("versions.json", _versions_json({"kvshare": own_version()}, {}))
    files["missing.txt"] = "".join(f"{line}\n" for line in missing) or "nothing\n"
    _write(target, files, time.timestamp())
    typer.echo(f"{target}: {len(files)} files; look through it before you send it to anybody")
    for line in missing:
        typer.echo(f"not in it: {line}", err=True)


async def _run(
    namespace: str | None, everywhere: bool, pool: str | None, operator_namespace: str, log_lines: int
) -> tuple[dict[str, str], list[str]]:
    api, close, home = check.connect()
    from kvshare_operator.cli.must_gather_reading import Gathering, Wanted
    from kvshare_operator.edges.cluster_api import ApiError

    where = None if everywhere else namespace or home
    gathering = Gathering(api, Wanted(where, pool, operator_namespace, log_lines))
    try:
        await gathering.everything()
        await _check(api, gathering, where, pool, qualified=everywhere)
    except ApiError as error:
        typer.echo(f"no cluster answers: {error}. Check KUBECONFIG and the network.", err=True)
        raise typer.Exit(3) from error
    finally:
        await close()
    return dict(sorted(gathering.files.items())), gathering.missing


async def _check(
    api: ClusterApi, gathering: Gathering, where: str | None, pool: str | None, *, qualified: bool
) -> None:
    """Add what `kvshare check` says; that it cannot say anything is no reason to write no archive."""
    try:
        seen = await read_cluster(api, where, pool)
    except (CannotReadError, NotInstalledError) as error:
        gathering.missing.append(f"check: {error}")
        return
    found = judge(seen, check.expiry(seen.certificate), check.now(), qualified=qualified)
    page = io.StringIO()
    print_findings(found, Console(file=page, soft_wrap=True))
    gathering.files["check.txt"] = page.getvalue() + "".join(f"{text}\n" for text in (*found.problems, *found.notes))
    gathering.files["check.json"] = json.dumps(found.to_json(), indent=2)
    pools = {one.name: one.versions for one in found.pools}
    gathering.files["versions.json"] = _versions_json(found.versions, pools)


def _versions_json(versions: Mapping[str, str], pools: Mapping[str, str]) -> str:
    return json.dumps({**versions, "Python": platform.python_version(), "pools": dict(pools)}, indent=2)


def _write(target: pathlib.Path, files: dict[str, str], time: float) -> None:
    """Write the archive whole or not at all, readable by its owner only."""
    unfinished = target.with_name(target.name + ".unfinished")
    top = target.name.removesuffix(".tar.gz")
    unfinished.touch(mode=0o600)
    try:
        with tarfile.open(unfinished, "w:gz") as archive:
            for name, text in files.items():
                content = text.encode()
                member = tarfile.TarInfo(f"{top}/{name}")
                member.size, member.mtime, member.mode = len(content), int(time), 0o644
                archive.addfile(member, io.BytesIO(content))
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)
