"""`kvshare plan` as a picture: the same data as the JSON, coloured in a terminal, SVG that any browser takes."""

from __future__ import annotations

import io
import json
from typing import Literal
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from kvshare_operator.api.pool import read_spec
from kvshare_operator.cli.main import app
from kvshare_operator.cli.plan_drawing import MOST_REPLICAS, drawing_of
from kvshare_operator.cli.plan_svg import plan_svg
from kvshare_operator.cli.plan_tables import print_plan
from kvshare_operator.core.pool.plan import Plan, PlannedPool, make_plan

SVG = "{http://www.w3.org/2000/svg}"
STORE = {"type": "External", "external": {"masterAddress": "a.b.svc:1"}}


def planned(heads: int | None, sizes: list[int], layers: int | None = None, pipelines: tuple[int, ...] = (1,)) -> Plan:
    """The plan of a pool with these prefill sizes."""
    model = {"name": "m"} if heads is None else {"name": "m", "kvHeads": heads}
    raw = {
        "model": model, "prefill": {"tensorParallelSizes": sizes}, "store": STORE,
        "pipelineParallelSizes": list(pipelines),
    }  # fmt: skip
    return make_plan(PlannedPool(spec=read_spec(raw)), None, layers)


def shown(plan: Plan, *, terminal: bool, width: int = 100) -> str:
    """What people see."""
    stream = io.StringIO()
    colours: Literal["standard", "auto"] = "standard" if terminal else "auto"
    out = Console(file=stream, force_terminal=terminal, width=width, color_system=colours, soft_wrap=True)
    print_plan(plan, out)
    return stream.getvalue()


@given(heads=st.sampled_from([1, 2, 4, 8]), sizes=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, unique=True))
def test_the_picture_has_every_rank_on_its_shards(heads: int, sizes: list[int]) -> None:
    """Bars of a lane do not overlap; with all replicas shown, the bars are the ranks of the plan."""
    plan = planned(heads, sizes)
    drawing = drawing_of(plan)
    assert drawing is not None
    drawn = set()
    title = ""
    for lane in drawing.lanes:
        title = lane.title or title
        ends = [-1, *(bar.last for bar in lane.bars)]
        assert all(bar.first > end for bar, end in zip(lane.bars, ends, strict=False))
        drawn |= {(title, bar.text, bar.first, bar.last) for bar in lane.bars}
    expected = {
        (f"TP {row.tp}", f"rank {row.rank}", row.shards[0], row.shards[-1])
        for row in plan.ranks
        if row.replica < MOST_REPLICAS
    }
    assert drawn == expected
    assert len(drawing.heads) == drawing.shards == plan.store_tp


def test_heads_that_nobody_knows_are_not_drawn() -> None:
    """Shards are."""
    drawing = drawing_of(planned(None, [4, 2]))
    assert drawing is not None
    assert (drawing.heads, drawing.shards) == ((), 4)


def test_a_terminal_gets_colours_and_a_pipe_gets_none() -> None:
    """The picture says the same without them."""
    plan = planned(8, [4, 2], 80, (1, 2))
    coloured, plain = shown(plan, terminal=True), shown(plan, terminal=False)
    assert "\x1b[" in coloured
    assert "\x1b[" not in plain
    assert "TP 2            [rank 0                       ] [rank 1                       ]\n" in plain
    assert "  layers 40-79  s0p1            s1p1            s2p1            s3p1\n" in plain


def test_replicas_stand_below_each_other_and_many_are_counted() -> None:
    """Ranks that hold the same heads; sixteen of them are not all drawn."""
    drawing = drawing_of(planned(1, [16]))
    assert drawing is not None
    assert [bar.text for lane in drawing.lanes for bar in lane.bars] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert drawing.notes == ("TP 16: 12 more ranks hold the same as each one shown",)


def test_a_short_line_gets_the_table_only() -> None:
    """A picture that wraps is no picture."""
    text = shown(planned(64, [64, 2]), terminal=True, width=80)
    assert "-o svg has room" in text
    assert "[rank" not in text
    assert "Who keeps what" in text


def test_svg_is_well_formed_and_has_every_object_and_rank() -> None:
    """One title for people who hear it; one label for each object and rank; the same text every time."""
    words = ["plan", "--kv-heads", "8", "--prefill", "4,2", "--decode", "1", "--pp", "1,2", "--layers", "8"]
    result = CliRunner().invoke(app, [*words, "-o", "svg"])
    assert result.exit_code == 0, result.output
    root = ElementTree.fromstring(result.stdout)
    texts = [node.text for node in root.iter(f"{SVG}text")]
    found = json.loads(CliRunner().invoke(app, [*words, "-o", "json"]).stdout)
    for row in found["ranks"]:
        assert texts.count(f"rank {row['rank']}") == len([one for one in found["ranks"] if one["rank"] == row["rank"]])
    objects = {f"s{shard}p{stage['stage']}" for shard in range(found["storeTPSize"]) for stage in found["stages"]}
    assert objects <= set(texts)
    assert root.find(f"{SVG}title") is not None
    assert CliRunner().invoke(app, [*words, "-o", "svg"]).stdout == result.stdout


def test_svg_escapes_its_title() -> None:
    """A title is text."""
    drawing = drawing_of(planned(8, [2]))
    assert drawing is not None
    assert ElementTree.fromstring(plan_svg(drawing, "a < b & c")).findtext(f"{SVG}title") == "a < b & c"


@pytest.mark.parametrize("sizes", ["3", "5"])
def test_a_plan_that_does_not_work_draws_nothing_and_says_why(sizes: str) -> None:
    """Exit code 1; the reason is on standard error."""
    result = CliRunner().invoke(app, ["plan", "--kv-heads", "8", "--prefill", sizes, "-o", "svg"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "StoreTPConflict" in result.stderr
