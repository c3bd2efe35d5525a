"""The table of the fault trials in ``docs/reliability.md``: rows are kept in ``build/faults`` and written as a page."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from testbed import places
from testbed.fault_trials import Outcome

ROWS = places.BUILD / "faults" / "rows.json"
PAGE = places.REPOSITORY / "docs" / "reliability.md"
START, END = "<!-- written by make test-faults -->", "<!-- until here -->"


def keep(outcome: Outcome, order: Sequence[str], *, rows: Path = ROWS, page: Path = PAGE) -> None:
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
    table = "\n".join(table_of([kept[name] for name in order if name in kept]))
    page.write_text(f"{before}{START}\n\n{table}\n\n{END}{rest.partition(END)[2]}")


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
