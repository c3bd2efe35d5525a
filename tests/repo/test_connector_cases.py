"""Cases: faults that comparable connectors have had, each named by at least one test of ours that would show it.

Letters are subjects: A identity, B geometry, C life cycle and races, D failures, E cost and operation, F ways to pass
easy tests and fail in production. Numbers that are missing here never applied to this connector.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
#: Folders of tests about the connector; the operator has a list of its own with the same letters.
FOLDERS = ("layout", "kernels", "store", "vllm_adapter", "engine")

CASES = {
    "A2": "old KV is served after weights changed under the same name",
    "A4": "incompatible configurations meet, or compatible ones do not",
    "A5": "hashes differ between processes and nothing ever hits",
    "A7": "an adapter's name collides with a cache salt",
    "A8": "a fleet of several versions shares only a part",
    "A9": "lookups build other keys than saves",
    "A11": "ranks disagree about a hit",
    "A13": "ranks overwrite each other's objects",
    "A14": "an incomplete object is stored under a complete name",
    "A15": "two block sizes meet on one key",
    "B3": "replicas of KV heads are written by all, or read from the wrong one",
    "B4": "wrong bytes as soon as TP sizes differ",
    "B6": "a quantised cache whose heads cannot be cut is cut",
    "B8": "CPU hosts with different kernels exchange bytes",
    "B9": "a layout is guessed from shapes",
    "B11": "the block size depends on the TP size",
    "B13": "an extra cache inside a layer group is overlooked",
    "B14": "a state is taken for replicated",
    "B15": "a layout is taken from the configuration",
    "B16": "completions are counted wrong with several ranks",
    "B17": "two layers both drop the last block of a hit",
    "C3": "pins leak when the store fails",
    "C5": "nothing is saved with speculative decoding",
    "C6": "ranks of a pipeline never save with speculative decoding",
    "C7": "null or swapped blocks are saved by position",
    "C9": "rejected drafts are saved",
    "C10": "old KV comes back after a reset",
    "C12": "one prefix is loaded many times at once",
    "C13": "a preempted request cannot load again",
    "C15": "the output of one step appears in the next",
    "C16": "the output of some ranks is dropped",
    "C18": "a synchronous load that fails gives wrong text",
    "C19": "everything is written and nothing read",
    "D2": "a failed load with several cache groups stops the engine",
    "D4": "block counts do not fit together after a failed load",
    "D5": "a request waits for ever for a load whose failure nobody reported",
    "D6": "objects that are evicted before they are read fail requests",
    "D8": "a lease runs out during a long load",
    "D9": "probes keep everything leased, and nothing can be evicted",
    "D11": "short reads are accepted",
    "D14": "one of two equal keys of a batch is not filled",
    "D15": "what exists and cannot be read is asked for again and again",
    "D16": "an object that is too large is skipped without a word",
    "D18": "an object leaves between lookup and load",
    "E1": "an object has very many segments",
    "E2": "lookups hold up the scheduler",
    "E3": "every rank writes a copy",
    "E4": "a size is multiplied by the number of ranks",
    "E5": "what a restarted store has lost is never stored again",
    "E6": "several clients on one host want one port",
    "E7": "events name the tier of another replica",
    "E8": "an engine that only produces looks prompts up",
    "F1": "scheduler and ranks decide separately",
    "F2": "the canary is taken before the hash seed exists",
    "F3": "the answer after a failed load is used up by a refused allocation",
    "F4": "pins break a reset",
    "F5": "the last blocks of a request are never saved",
    "F6": "a slow store takes blocks from serving",
    "F7": "one bad node fails a whole batch",
    "F8": "a CPU hides what a device would show",
    "F9": "equal text proves nothing about bytes",
    "F10": "long prompts and many layers stop the store's client",
}


def _named() -> dict[str, set[str]]:
    """Cases by the tests whose docstrings name them."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in sorted((TESTS / folder).glob("test_*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                    for case in re.findall(r"\b[A-F][0-9]{1,2}\b", ast.get_docstring(node) or ""):
                        found.setdefault(case, set()).add(f"{folder}/{path.name}::{node.name}")
    return found


@pytest.fixture(scope="module")
def named() -> dict[str, set[str]]:
    """Cases by the tests whose docstrings name them."""
    return _named()


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_test_that_names_it(named: dict[str, set[str]], case: str) -> None:
    """Who wants to know whether we have a fault finds the test that would show it."""
    assert named.get(case), f"no test names {case}: {CASES[case]}"


def test_no_test_names_a_case_that_is_not_listed(named: dict[str, set[str]]) -> None:
    """A wrong number would hide that a case has no test."""
    assert {case: sorted(tests) for case, tests in named.items() if case not in CASES} == {}
