"""`kvshare plan`: Store TP, shards and stages of a pool, before it is applied. Needs no cluster."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvshare_operator.api.pool import SpecError, read_spec
from kvshare_operator.api.reasons import refusal
from kvshare_operator.api.schema import MAX_SIZE
from kvshare_operator.cli.model_file import read_model_file
from kvshare_operator.cli.plan_drawing import drawing_of
from kvshare_operator.cli.plan_svg import plan_svg
from kvshare_operator.cli.plan_tables import print_plan
from kvshare_operator.cli.pool_file import read_pool_file, to_planned
from kvshare_operator.cli.usage import with_examples
from kvshare_operator.core.pool.plan import Plan, PlannedPool, PlanProblem, make_plan

_EXAMPLES = """
Examples:

  kvshare plan --kv-heads 8 --prefill 4,2 --decode 2

  kvshare plan -f pool.yaml --model-config config.json   # heads, layers and kinds of caches of this model

  kubectl get kvsharepool llama -o yaml | kvshare plan -f - -o json

  kvshare plan -f pool.yaml -o svg > pool.svg

  kvshare plan -f new.yaml --previous old.yaml   # would the edit start an empty cache?
"""


class Output(enum.StrEnum):
    """How to print."""

    table = "table"
    json = "json"
    svg = "svg"


def _sizes(text: str | None, flag: str) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and 1 <= int(part) <= MAX_SIZE for part in parts):
        raise typer.BadParameter(
            f"{text!r} given, whole numbers from 1 to {MAX_SIZE} such as 4,2 expected", param_hint=flag
        )
    return list(dict.fromkeys(int(part) for part in parts))


@with_examples(_EXAMPLES)
def plan(
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="POOL.yaml", help="A KVSharePool; - is standard input.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=MAX_SIZE, help="Total KV heads of the model; 1 for MLA.")
    ] = None,
    prefill: Annotated[str | None, typer.Option(metavar="4,2", help="TP sizes of prefill deployments.")] = None,
    decode: Annotated[str | None, typer.Option(metavar="2", help="TP sizes of decode deployments.")] = None,
    reserved: Annotated[str | None, typer.Option(metavar="8", help="TP sizes that will be added later.")] = None,
    pp: Annotated[str | None, typer.Option(metavar="1,2", help="Pipeline-parallel sizes.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Hidden layers of the model, to show stages.")] = None,
    model_config: Annotated[
        str | None,
        typer.Option(metavar="config.json", help="The model's own file: its KV heads, layers and kinds of caches."),
    ] = None,
    previous: Annotated[
        str | None, typer.Option(metavar="OLD.yaml", help="The pool before an edit, to see whether it splits.")
    ] = None,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="table for people, json for programs, svg as a picture.")
    ] = Output.table,
) -> None:
    """Show Store TP, who keeps which heads and shards, and stages, before a pool is applied.

    Exit code 0: the plan works; 1: it does not, with every problem named; 2: wrong usage.
    """
    if file is not None and any((prefill, decode, reserved, pp)):
        raise typer.BadParameter("-f brings its own sizes: leave --prefill, --decode, --reserved and --pp out")
    model = read_model_file(model_config) if model_config is not None else None
    if model is not None:
        kv_heads = _agreed(kv_heads, model.kv_heads, "--kv-heads")
        layers = _agreed(layers, model.layers, "--layers")
    if file is None and (prefill is None or kv_heads is None):
        raise typer.BadParameter("either -f POOL.yaml, or --kv-heads or --model-config with --prefill, is expected")
    try:
        wanted = _from_file(file, kv_heads) if file else _from_flags(kv_heads, prefill, decode, reserved, pp)
        before = _from_file(previous, kv_heads) if previous else None
        found = make_plan(wanted, before, layers, model)
    except SpecError as error:
        found = _unreadable(error)
    if output is Output.json:
        typer.echo(json.dumps(to_json(found), indent=2))
    elif output is Output.svg:
        _print_svg(found)
    else:
        print_plan(found)
    if found.problems:
        raise typer.Exit(1)


def _agreed(given: int | None, found: int | None, flag: str) -> int | None:
    """A number from a flag and from the model's file."""
    if given is not None and found is not None and given != found:
        raise typer.BadParameter(
            f"{given} given, the model's file says {found}: leave one of them out", param_hint=flag
        )
    return found if given is None else given


def _print_svg(found: Plan) -> None:
    """Print the picture, if there is one; problems go to standard error, as a picture has no place for them."""
    drawing = drawing_of(found)
    if drawing is not None:
        typer.echo(plan_svg(drawing, f"Store TP {found.store_tp}: which rank holds which shards"), nl=False)
    for problem in found.problems:
        typer.echo(f"{problem.field}: {problem.refusal.sentence()}", err=True)


def _from_file(path: str, kv_heads: int | None) -> PlannedPool:
    return to_planned(read_pool_file(path), kv_heads)


def _from_flags(
    kv_heads: int | None, prefill: str | None, decode: str | None, reserved: str | None, pp: str | None
) -> PlannedPool:
    raw: dict[str, Any] = {
        "model": {"name": "plan", "kvHeads": kv_heads},
        "prefill": {"tensorParallelSizes": _sizes(prefill, "--prefill")},
        "store": {"type": "External", "external": {"masterAddress": "plan.plan.svc:50051"}},
    }
    if decode is not None:
        raw["decode"] = {"tensorParallelSizes": _sizes(decode, "--decode")}
    if reserved is not None:
        raw["reservedTensorParallelSizes"] = _sizes(reserved, "--reserved")
    if pp is not None:
        raw["pipelineParallelSizes"] = _sizes(pp, "--pp")
    return PlannedPool(spec=read_spec(raw))


def _unreadable(error: SpecError) -> Plan:
    problems = tuple(PlanProblem(field, refusal("SpecInvalid", problem=text)) for field, text in error.mistakes)
    return Plan(None, "lcm", None, False, (), (), problems)


def _stages_json(cut: Sequence[tuple[int, Sequence[int]]]) -> list[dict[str, Any]]:
    return [{"stage": number, "layers": list(members)} for number, members in cut]


def to_json(found: Plan) -> dict[str, Any]:
    """Return the documented JSON of a plan."""
    return {
        "storeTPSize": found.store_tp,
        "source": found.source,
        "cacheNamespace": found.cache_namespace,
        "cacheSplit": found.cache_split,
        "ranks": [
            {
                "tp": row.tp,
                "rank": row.rank,
                "kvHeads": list(row.kv_heads),
                "shards": list(row.shards),
                "replica": row.replica,
                "replicas": row.replicas,
            }
            for row in found.ranks
        ],
        "stages": _stages_json(found.stages),
        "kinds": [
            {
                "name": kind.name,
                "retention": kind.words,
                "windowTokens": kind.window,
                "layers": list(kind.layers),
                "stages": _stages_json(kind.stages),
                "cached": kind.cached,
            }
            for kind in found.kinds
        ],
        "problems": [
            {
                "reason": one.refusal.code,
                "field": one.field,
                "message": one.refusal.message,
                "remedy": one.refusal.remedy,
            }
            for one in found.problems
        ],
    }
