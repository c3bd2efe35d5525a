"""Every known case of comparable operators has its test here: each row's name stands in a test's docstring.

The rows are faults that other webhooks, controllers and charts have had. B names come from their trackers, F names
are ways to pass easy tests and fail in real clusters.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = {
    "shape of the request": "B04 B05 B07 B09 B10",
    "command and arguments": "B11 B12x B13 B15 B18 B23 B24 B26 B28",
    "environment": "B29 B31 B32 B34 B36 B37",
    "containers, volumes, quota, security": "B40 B41 B42 B43 B45 B46 B47 B48",
    "webhook server, certificates, chart": "B49 B50 B51 B52 B53 B54 B55 B56",
    "controller and resource": "B57 B58 B59 B60 B61",
    "store": "B63 B64",
    "real clusters": "F1 F2 F3 F4 F5 F6 F7 F8 F9 F10",
}
OPERATOR_FOLDERS = ("admission", "reconcile", "crd", "chart", "cli", "managed_store", "node")
BEGINNING = re.compile(r"(?:\d[\d.]*, )*[BF]\d+x?(?:, [BF]?\d[\dx.]*)*(?=[:.,])")
"""`B13, 5.3, F2: a sentence`: rows and sections of the design in front of a docstring."""
NODE_CASES = "F1 F2 F3 F4 F5 F6 F7 F8 F9 F10"


def named_cases(folders: tuple[str, ...]) -> dict[str, set[str]]:
    """Case -> tests whose docstring begins with it, alone or in a list, in some folders of tests."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "tests/*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    for name in set(listed.stdout.split()):
        path = ROOT / name
        if path.parent.name not in folders or not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                head = BEGINNING.match(ast.get_docstring(node) or "")
                for case in re.findall(r"[BF]\d+x?", head[0] if head else ""):
                    found.setdefault(case, set()).add(f"{name}::{node.name}")
    return found


NAMED = named_cases(OPERATOR_FOLDERS)


@pytest.mark.parametrize("case", " ".join(CASES.values()).split())
def test_case_has_a_test_that_names_it(case: str) -> None:
    """A row without a test, or a test that lost its row, is seen here."""
    assert NAMED.get(case), f"no test of {', '.join(OPERATOR_FOLDERS)} begins its docstring with {case}"


def test_no_test_names_a_case_that_does_not_exist() -> None:
    """A typo in a row's name is no proof."""
    assert set(NAMED) <= set(" ".join(CASES.values()).split())


@pytest.mark.parametrize("case", NODE_CASES.split())
def test_case_of_real_clusters_is_played_on_one(case: str) -> None:
    """Section F is about what only a real cluster shows."""
    assert [test for test in NAMED.get(case, ()) if "/node/" in test or "on_one_node" in test]
