"""What pages show as output is what the programs print, as far as that can be known without running the demo."""

from __future__ import annotations

import json
import re
import typing

import pytest
from typer.testing import CliRunner

from kvshare_operator.api import crd
from kvshare_operator.api.reasons import refusal
from kvshare_operator.cli.main import app
from kvshare_operator.core.pool.census import State
from pages import ALL, ROOT, Block, commands
from testbed.demo import steps
from testbed.demo.manifests import render
from testbed.demo.settings import Settings

TUTORIAL = ROOT / "docs" / "tutorial" / "demo.md"
CONSOLE = [
    pytest.param(block, id=block.place)
    for block in ALL
    if block.language == "console" and (found := commands(block)) and found[0].words[:2] == ("kvshare", "plan")
]


@pytest.mark.parametrize("block", CONSOLE)
def test_output_of_kvshare_plan_is_real(block: Block) -> None:
    """Line by line, until `...`."""
    (command,) = commands(block)
    printed = [line.rstrip() for line in CliRunner().invoke(app, list(command.words[1:])).stdout.splitlines()]
    shown = [line.rstrip() for line in block.text.splitlines() if not line.startswith("$ ")]
    end = shown.index("...") if "..." in shown else len(shown)
    assert shown[:end] == printed[:end]


def test_the_tutorials_numbers_are_those_of_the_kept_report() -> None:
    """Transcript, table and plot show one run, whose rows are what the steps must give."""
    text = TUTORIAL.read_text()
    rows = json.loads((ROOT / "docs" / "tutorial" / "report.json").read_text())["rows"]
    for row in rows:
        assert (
            f"{row['step']}: {row['cached_tokens']} of {row['prompt_tokens']} prompt tokens cached, tokens match"
            in text
        )
        numbers = f"{row['cached_tokens']} / {row['prompt_tokens']}"
        cells = rf"│ {row['step']} +│ {row['engine']} +│ +{row['tp']} │ {row['layout']} +│ +{numbers} │ yes"
        assert re.search(cells, text)
        assert f"\n| {row['step']} | " in text
    prompt, conversation = steps.PROMPT_TOKENS, steps.PROMPT_TOKENS + steps.ANSWER_TOKENS + steps.CONVERSATION_TOKENS
    assert [row["cached_tokens"] for row in rows[:3]] == [
        0,
        steps.whole_blocks(prompt - 1),
        steps.whole_blocks(prompt - 1),
    ]
    assert [row["prompt_tokens"] for row in rows[:3]] == [prompt, prompt, conversation]


def test_the_tutorials_pool_is_the_demos() -> None:
    """With its values filled in."""
    (pool,) = render(
        "pool", model="/models/tiny-llama", namespace=steps.NAMESPACE, prefill_sizes=[4, 2], decode_sizes=[1],
    )  # fmt: skip
    shown = [one for block in ALL if block.page == TUTORIAL and block.language == "yaml" for one in block.documents()]
    assert [one["spec"] for one in shown] == [pool["spec"]]
    assert Settings().prefill_sizes == (4, 2)


def test_the_tutorials_refusal_has_the_products_own_words() -> None:
    """Cause and remedy."""
    sentence = refusal("TPNotInPool", given=3, pool="demo", role="prefill", expected="2, 4").sentence()
    assert sentence in TUTORIAL.read_text()


def test_every_state_of_an_owner_leads_on() -> None:
    """The page about refusals has each state that `kvshare check` prints."""
    page = (ROOT / "docs" / "howto" / "reading-a-refusal.md").read_text()
    (table,) = re.findall(r"\| State \| Meaning .*?\n\n", page, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:] if row)))
    printed = {*typing.get_args(State), "groupIncomplete"} - {"recordDiffers"}  # an edited record changes nothing
    assert named == printed


def test_the_refusals_message_on_the_page_is_the_products() -> None:
    """The record of a pod whose script does not expand the variable."""
    page = (ROOT / "docs" / "howto" / "reading-a-refusal.md").read_text()
    sentence = refusal("ShellWrapper", container="vllm", problem="it does not expand $KVSHARE_VLLM_ARGS").message
    assert f'"reason":"ShellWrapper","message":"{sentence} Put ..."' in page


def test_the_answer_to_a_moved_store_tp_is_the_resources() -> None:
    """Word for word the rule of the definition."""
    page = (ROOT / "docs" / "howto" / "adding-a-tp-size.md").read_text()
    rules = [rule["message"] for rule in crd.structural_schema()["x-kubernetes-validations"]]
    assert any(f"\n{message}\n" in page for message in rules)
