"""Every supported version of vLLM, one by one: the connector's own tests with its scheduler, then real engines.

Each version has an environment of its own, built on demand. A version without a build for CPUs is tested with its
Python sources in the place of the installed vLLM: interface, scheduler, aggregation of the ranks' reports.
"""

import datetime
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from testbed import mooncake, places, versions
from testbed.engine import engine
from testbed.kept import Rows, rows, write
from testbed.prepare import runner, vllm_versions
from testbed.sharing import BLOCK, ENVIRONMENT, connector_flags, member, settle, text, troubles

pytestmark = pytest.mark.versions

STORE_TP, PROMPT, ANSWER_TOKENS = 4, text(1, 976), 64
CACHED = len(PROMPT) // BLOCK * BLOCK
TABLE = places.REPOSITORY / "docs" / "benchmarks" / "versions.md"
VERSIONS = (*vllm_versions.TESTED, *vllm_versions.SOURCES_ONLY)


@pytest.fixture(scope="module")
def results() -> Iterator[Rows]:
    """Filled by the tests; the table is written at the end, whatever it says, when every version has run."""
    with rows("vllm") as found:
        yield found
    wanted = {version: 3 if version in vllm_versions.TESTED else 2 for version in VERSIONS}
    if all(len(found.get(version, {})) >= columns for version, columns in wanted.items()):
        write_table(found, TABLE)


def write_table(results: Rows, path: Path) -> None:
    """The dated table for the documentation."""
    lines = [
        "# Versions of vLLM",
        "",
        f"{datetime.date.today().isoformat()}, written by `make test-versions`. *Connector's tests* are "
        "`tests/vllm_adapter`: the connector driven by that version's own scheduler, with the signatures of every hook "
        "compared. *TP 2 to TP 1* are real engines on CPU with Mooncake over TCP: a token-major TP 2 engine computes "
        f"{len(PROMPT)} tokens, a head-major TP 1 engine takes {CACHED} of them from the store, and its "
        f"{ANSWER_TOKENS} tokens equal those of a TP 1 engine of the same version without connector.",
        "",
        "| vLLM | Python | connector's tests | TP 2 to TP 1 |",
        "|---|---|---|---|",
    ]
    for version in VERSIONS:
        row = {"engines": "not run: this version has no build for CPUs", **results.get(version, {})}
        lines.append(f"| {version} | {row['python']} | {row['own tests']} | {row['engines']} |")
    write(path, lines)


def prepared(version: str) -> tuple[Path, dict[str, str]]:
    """Python and variables with which a version is imported; built when it is not there."""
    if version == versions.VLLM:
        return places.environment_python(), {}
    if version in vllm_versions.SOURCES_ONLY:
        assert runner.run([vllm_versions.sources(version)], quiet_when_done=True)
        return places.environment_python(), {"PYTHONPATH": str(vllm_versions.sources_of(version))}
    assert runner.run([vllm_versions.environment(version)], quiet_when_done=True)
    return vllm_versions.environment_of(version) / "bin" / "python", {}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_connectors_own_tests_pass_with_this_scheduler(results: Rows, version: str) -> None:
    """Interface, life cycle, faults and figures, all with the scheduler of that version."""
    row = results.setdefault(version, {})
    row["own tests"] = "not passed"
    python, variables = prepared(version)
    environment = {**os.environ, **variables}
    asked = [str(python), "-c", "import platform, vllm; print(vllm.__version__, platform.python_version())"]
    said = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert said[0].split("+")[0] == version
    row["python"] = said[1]
    ran = subprocess.run(
        [python, "-m", "pytest", "tests/vllm_adapter", "-q", "-p", "no:cacheprovider", "--timeout=120"],
        cwd=places.REPOSITORY, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    summary = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ran.stderr[-500:]
    row["own tests"] = re.sub(r" in .*", "", summary).strip("= ")
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


@pytest.mark.parametrize("version", vllm_versions.TESTED)
def test_tp_1_takes_what_tp_2_has_stored(results: Rows, tmp_path: Path, version: str) -> None:
    """Real engines of that version: 960 of 976 tokens from the store, the answer of TP 1 alone, no failed key."""
    row = results.setdefault(version, {})
    row["engines"] = "not passed"
    python, _ = prepared(version)
    installation = python.parents[1]
    with engine(tmp_path, "reference", layout="HND", reference_attention=True, installation=installation) as reference:
        expected = reference.server.complete(PROMPT, max_tokens=ANSWER_TOKENS)
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(tmp_path))
        flags = connector_flags(store, store_tp=STORE_TP, save_decode_cache=False)
        writer, reader = (
            stack.enter_context(
                engine(
                    tmp_path, name, tp=tp, layout=layout, reference_attention=True, arguments=flags,
                    environment=ENVIRONMENT, installation=installation,
                )
            ).server
            for name, tp, layout in (("writer", 2, "NHD"), ("reader", 1, "HND"))
        )  # fmt: skip
        writer.complete(PROMPT, max_tokens=1)
        settle(store, CACHED // BLOCK * STORE_TP)
        answer = reader.complete(PROMPT, max_tokens=ANSWER_TOKENS)
        assert [member(server)["verdict"] for server in (writer, reader)] == ["shared", "shared"]
        assert (answer.cached_tokens, answer.token_ids) == (CACHED, expected.token_ids)
        assert [troubles(server) for server in (writer, reader)] == [{}, {}]
    row["engines"] = f"{answer.cached_tokens} of {len(PROMPT)} cached, tokens equal, no failed key"
