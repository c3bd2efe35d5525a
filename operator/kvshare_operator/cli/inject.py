"""`kvshare inject`: what the webhook would do to people's manifests. Needs no cluster."""

from __future__ import annotations

import difflib
import enum
import json
import pathlib
import re
from typing import Annotated

import typer

from kvshare_operator.api.pool import SpecError, read_spec
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.cli.inject_items import Item, Pools, items_of, patched, services_of
from kvshare_operator.cli.manifests import Document, changed, normalised, read_source
from kvshare_operator.cli.pool_file import read_pool_file
from kvshare_operator.cli.usage import with_examples
from kvshare_operator.core.injection.settings import KNOWN_IMAGES, InjectionSettings
from kvshare_operator.core.pool.view import PoolView, view

DEFAULT_IMAGE = "ghcr.io/kvshare/kvshare-connector:0.1.0"
"""The chart's default."""

_EXAMPLES = """
Examples:

  kvshare inject -f deployment.yaml --pool pool.yaml -o diff

  helm template my-engines | kvshare inject -f - --pool pool.yaml | kubectl apply -f -

  kvshare inject -f prefill.yaml -f decode.yaml --pool pool.yaml -o json | jq '.items[].decision'
"""


class Output(enum.StrEnum):
    """How to print."""

    yaml = "yaml"
    diff = "diff"
    json = "json"


@with_examples(_EXAMPLES)
def inject(
    files: Annotated[
        list[str], typer.Option("-f", "--file", metavar="PODS.yaml", help="Manifests; - is standard input; repeatable.")
    ],
    pool: Annotated[list[str], typer.Option("--pool", metavar="POOL.yaml", help="A KVSharePool; repeatable.")],
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", help="For objects that name none. Default: the first pool's."),
    ] = None,
    connector_image: Annotated[str, typer.Option(help="Payload image for pools that name none.")] = DEFAULT_IMAGE,
    report_url: Annotated[str, typer.Option(help="Where members report; empty: nowhere.")] = "",
    report_ca: Annotated[
        pathlib.Path | None, typer.Option(metavar="CA.crt", help="CA certificates of the report endpoint.")
    ] = None,
    kubernetes_version: Annotated[
        str | None, typer.Option(metavar="1.36", help="The cluster's version, for pools with image volumes.")
    ] = None,
    known_image: Annotated[
        list[str] | None, typer.Option(metavar="REGEX", help="Images whose ENTRYPOINT runs vLLM; repeatable.")
    ] = None,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="yaml for kubectl, diff for people, json for programs.")
    ] = Output.yaml,
) -> None:
    """Inject pools into the pod templates of manifests, exactly as the webhook would.

    Works on every kind with a pod template, on lists, and on files with several documents. `yaml` prints the
    files with our additions; comments and order stay. What was decided, and why, goes to standard error.

    Where a webhook runs as well, give --report-url, --report-ca and --connector-image as the installation has
    them: otherwise the webhook meets flags that are not its own, and leaves those pods as they are.

    Exit code 0: everything that opted in is injected; 1: something is refused, or its annotations stand where its pods
    do not get them; 2: wrong usage.
    """
    if [*files, *pool].count("-") > 1:
        raise typer.BadParameter("standard input (-) can be read once: give the other one as a file")
    settings = _settings(connector_image, report_url, report_ca, kubernetes_version, known_image)
    documents, mistakes = _read(files)
    pools, home, more = _read_pools(pool, namespace, connector_image)
    if mistakes or more:
        raise typer.BadParameter("\n".join([*more, *mistakes]))
    services = services_of((one.content for one in documents), home)
    decided = [(one, items_of(one.source, one.content, pools, home, settings, services)) for one in documents]
    items = [item for _, found in decided for item in found]
    if output is Output.json:
        typer.echo(json.dumps({"items": [item.to_json() for item in items]}, indent=2))
    else:
        _print_documents(decided, output)
        for item in items:
            _say(item)
    if any(item.reason and item.template_path is not None for item in items):
        raise typer.Exit(1)


def _settings(
    image: str, url: str, ca: pathlib.Path | None, version: str | None, known: list[str] | None
) -> InjectionSettings:
    server: tuple[int, int] | None = None
    if version is not None:
        match = re.fullmatch(r"v?(\d+)\.(\d+)(\..*)?", version)
        if not match:
            raise typer.BadParameter(f"{version!r} given, 1.36 or the like expected", param_hint="--kubernetes-version")
        server = (int(match[1]), int(match[2]))
    for pattern in known or []:
        try:
            re.compile(pattern)
        except re.error as error:
            raise typer.BadParameter(f"{pattern!r} is no regular expression: {error}") from error
    try:
        certificates = ca.read_text(encoding="utf-8") if ca is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{ca} cannot be read: {error}", param_hint="--report-ca") from error
    if url and not certificates:
        raise typer.BadParameter("--report-url needs --report-ca, which members check the endpoint with")
    return InjectionSettings(
        connector_image=image,
        report_url=url,
        report_ca=certificates,
        server_version=server,
        known_images=tuple(known) if known else KNOWN_IMAGES,
    )


def _read(files: list[str]) -> tuple[list[Document], list[str]]:
    documents: list[Document] = []
    mistakes: list[str] = []
    for path in files:
        found, wrong = read_source(path)
        documents.extend(found)
        mistakes.extend(wrong)
    return documents, mistakes


def _read_pools(paths: list[str], namespace: str | None, image: str) -> tuple[Pools, str, list[str]]:
    pools: dict[tuple[str, str], PoolView | Refusal] = {}
    mistakes: list[str] = []
    home = namespace
    for path in paths:
        try:
            raw = read_pool_file(path)
        except typer.BadParameter as error:
            mistakes.append(error.message)
            continue
        metadata = raw.setdefault("metadata", {})
        home = home or metadata.get("namespace") or "default"
        metadata.setdefault("namespace", home)
        key = (str(metadata["namespace"]), str(metadata.get("name", "")))
        try:
            read_spec(raw.get("spec"), unknown_keys="forbid")
            pools[key] = view(raw, image)
        except SpecError as error:
            pools[key] = refusal("SpecInvalid", problem=str(error))
    return pools, home or "default", mistakes


def _print_documents(decided: list[tuple[Document, list[Item]]], output: Output) -> None:
    printed = ""
    for document, items in decided:
        operations = [operation for item in items for operation in item.in_document()]
        before = after = document.text
        if operations:
            after, kept = changed(document, operations, patched(document.content, items))
            if not kept:
                typer.echo(f"{document.source}: a document with anchors was written out, without comments", err=True)
        if output is Output.diff:
            if operations:
                _print_diff(document, items, normalised(document) if before != after else before, after)
            continue
        if printed and not after.startswith("---") and not printed.rstrip().endswith("\n..."):
            typer.echo(f"---{document.newline}", nl=False)
        printed = after
        ended = after if after.endswith("\n") else f"{after}\n"
        typer.echo(ended.replace("\n", document.newline), nl=False)


def _print_diff(document: Document, items: list[Item], before: str, after: str) -> None:
    names = ", ".join(dict.fromkeys(f"{item.kind}/{item.name}" for item in items if item.patch))
    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), document.source, f"{document.source} ({names})", lineterm=""
    )
    for line in lines:
        typer.secho(line, fg=colours.get(line[:1]))


def _say(item: Item) -> None:
    where = f"{item.source}: {item.kind}/{item.name}" + (f" {item.template_path}" if item.template_path else "")
    if item.decision == "notOptedIn" and not (item.reason or item.message):
        return
    text = f"{where}: {item.decision}"
    if item.reason:
        text += f": {item.reason}: {item.message} {item.remedy}"
    elif item.message:
        text += f" ({item.message})"
    typer.secho(text, fg="red" if item.decision == "refused" else None, err=True)
