"""`python3 -m testbed.node_table`: the dated table of what the one-node cluster has shown, from pytest's own reports.

One row for each test of the groups `node` and `scenario`: its sentence, what it proves, how long it took, how it
ended. Reads `build/junit/*.xml` and the tests' docstrings; standard library only, so that it runs anywhere.
"""

import ast
import datetime
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from testbed import places

REPORTS = places.REPOSITORY / "build" / "junit"
TABLE = places.REPOSITORY / "docs" / "benchmarks" / "node.md"


@dataclass(frozen=True)
class Row:
    """One test as it ran.

    Attributes:
        file: below the repository.
        name: without parameters.
        seconds: with the set-up that the first test of a file pays for.
        result: passed, failed or skipped.
        when: when its run began, as pytest writes it.
    """

    file: str
    name: str
    seconds: float
    result: str
    when: str


def read_report(report: Path) -> list[Row]:
    """All tests of one report, in their order."""
    rows = []
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        when = suite.get("timestamp", "")
        for case in suite.iter("testcase"):
            broken = case.find("failure") is not None or case.find("error") is not None
            result = "failed" if broken else "skipped" if case.find("skipped") is not None else "passed"
            file = case.get("classname", "").replace(".", "/") + ".py"
            rows.append(Row(file, case.get("name", ""), float(case.get("time", "0")), result, when))
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row for each test: of one that ran in several reports, the run that began last."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        known = found.get((row.file, row.name))
        if known is None or known.when <= row.when:
            found[row.file, row.name] = row
    return list(found.values())


def sentences(file: Path) -> tuple[str, dict[str, str]]:
    """The first sentence of a test file, and the first line of every test's docstring."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    tests = {
        node.name: (ast.get_docstring(node) or "").splitlines()[0]
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    return (ast.get_docstring(module) or "").partition("\n")[0], tests


def table(rows: Iterable[Row], root: Path = places.REPOSITORY) -> str:
    """The page."""
    rows = latest(rows)
    good = sum(row.result == "passed" for row in rows)
    dates = sorted({row.when[:10] for row in rows if row.when}) or [datetime.date.today().isoformat()]
    lines = [
        "# Stories on the one-node cluster",
        "",
        f"{' and '.join(dates)}, `make test-node` on {os.cpu_count()} cores: a real API server, scheduler, kubelet and "
        "containerd, the chart, real vLLM on CPU and a real Mooncake. "
        f"{good} of {len(rows)} tests passed. Names such as F3 or B28 are cases that tests of other folders share.",
    ]
    for file in dict.fromkeys(row.file for row in rows):
        about, tests = sentences(root / file)
        lines += ["", f"## {Path(file).stem.removeprefix('test_').replace('_', ' ').capitalize()}", "", about, ""]
        lines += ["| What happens | What it shows | Seconds | Result |", "|---|---|---|---|"]
        for row in rows:
            if row.file == file:
                what = row.name.partition("[")[0].removeprefix("test_").replace("_", " ")
                shows = tests.get(row.name.partition("[")[0], "").replace("|", "\\|")
                lines.append(f"| {what} | {shows} | {row.seconds:.0f} | {row.result} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the table."""
    reports = sorted(REPORTS.glob("node*.xml")) + sorted(REPORTS.glob("scenario*.xml"))
    if not reports:
        print(f"no reports in {REPORTS}: run `make test-node`", file=sys.stderr)
        return 1
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(table(row for report in reports for row in read_report(report)), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(places.REPOSITORY)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
