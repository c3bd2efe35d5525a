"""The table of the fault trials in ``docs/reliability.md``: rows are kept in ``build/faults`` and written as a page."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from testbed import fault_picture, places
from testbed.fault_trials import Fault, Outcome, Pair, judge, run_trial

ROWS = places.BUILD / "faults" / "rows.json"
PAGE = places.REPOSITORY / "docs" / "reliability.md"
PICTURE = Path("figures", "faults.svg")
"""Below the page's folder."""
#: Models with two kinds of caches; the names of their trials begin so.
HYBRIDS = ("windows", "states")
_OF_HYBRIDS = ("calm", "removed", "aborted", "node-killed", "master-killed")
#: Names of all trials, in the order of the table.
ORDER = (
    "calm", "removed", "short", "other-size", "half-written", "aborted", "reset", "node-stopped", "node-killed",
    "last-node-killed", "master-refuses", "master-swallows", "master-killed", "full", "pressure", "neighbours",
    "writer-killed", "preempted", *(f"windows-{name}" for name in _OF_HYBRIDS), "windows-preempted",
    *(f"states-{name}" for name in _OF_HYBRIDS),
)  # fmt: skip
START, END = "<!-- written by make test-faults -->", "<!-- until here -->"


def answers(hybrid: str = "", *, short: int = 8) -> dict[str, int]:
    """Length of the answers in the trials of a model of ``HYBRIDS``, or of the others, by name of the trial.

    Requests with longer ones outgrow a small cache and are preempted.
    """
    return {
        name: 40 if "preempted" in name else short
        for name in ORDER
        if next((model for model in HYBRIDS if name.startswith(f"{model}-")), "") == hybrid
    }


def keep(outcome: Outcome, *, order: Sequence[str] = ORDER, rows: Path = ROWS, page: Path = PAGE) -> None:
    """Keep a row, in place of an older one of the same trial, and write the page anew.

    Args:
        outcome: the row.
        order: names of all trials.
        rows: where rows are kept.
        page: the page; the text between the two marks is replaced.
    """
    kept: dict[str, dict[str, object]] = json.loads(rows.read_text()) if rows.exists() else {}
    kept[outcome.trial] = asdict(outcome)
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text(json.dumps(kept, indent=1))
    before, _, rest = page.read_text().partition(START)
    chosen = [kept[name] for name in order if name in kept]
    table = "\n".join(table_of(chosen))
    fault_picture.draw(chosen, page.parent / PICTURE)
    page.write_text(f"{before}{START}\n\n{table}\n\n{END}{rest.partition(END)[2]}")


def measure_calm(engines: Pair, name: str, title: str) -> None:
    """The run in which nothing goes wrong, with which the others are compared; to be judged by a test of its own."""
    engines.first = run_trial(engines, name, title, lambda *_: contextlib.nullcontext(), seconds=8)
    keep(engines.first)


def trial(engines: Pair, name: str, title: str, fault: Fault, *, seconds: float = 7) -> Outcome:
    """Run a trial, keep its row whatever it shows, and judge it."""
    outcome = run_trial(engines, name, title, fault, seconds=seconds)
    keep(outcome)
    judge(engines, outcome)
    return outcome


def table_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of the table."""
    dates = sorted(str(row["date"]) for row in rows)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    total = sum(int(str(row["requests"])) for row in rows)
    bad = {name: sum(len(_texts(row[name])) for row in rows) for name in ("wrong", "failed")}
    lines = [
        f"{when}, on {os.cpu_count()} cores: {total} requests in {len(rows)} trials, "
        f"{bad['wrong']} with a wrong token, {bad['failed']} failed.",
        "",
        "| What goes wrong | Requests | Wrong | Failed | Median | 95 % | Longest | Hits back after | Counted |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        recovery = float(str(row["recovery"]))
        lines.append(
            f"| {row['title']} | {row['requests']} | {len(_texts(row['wrong']))} | {len(_texts(row['failed']))} "
            f"| x {float(str(row['median_ratio'])):.1f} | x {float(str(row['tail_ratio'])):.1f} "
            f"| {float(str(row['longest'])):.1f} s | {f'{recovery:.0f} s' if recovery >= 0 else 'never'} "
            f"| {_seen(row['seen'])} |"
        )
    return lines


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else list(value) if isinstance(value, tuple) else []


def _seen(value: object) -> str:
    items = value if isinstance(value, dict) else {}
    order = sorted(items, key=lambda name: (name != "loaded blocks", name))
    return ", ".join(f"{items[name]} {name}" for name in order)
