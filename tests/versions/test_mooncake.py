"""The two newest versions of Mooncake: master, store nodes and client of each, under the tests of the store's edge."""

import datetime
import os
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from testbed import places, subjects
from testbed.kept import Rows, write
from testbed.prepare import mooncake_versions, runner

pytestmark = pytest.mark.versions

TABLE = places.REPOSITORY / "docs" / "benchmarks" / "mooncake.md"
VERSIONS = (metadata.version(mooncake_versions.PACKAGE), *mooncake_versions.OTHER)
SUBJECTS = {"store, client, faults": ("tests/store",), "`kvshare purge`": ("tests/purge",)}


@pytest.fixture(scope="module")
def results() -> Iterator[Rows]:
    """What every version's tests said; the table is written at the end, whatever it says, when all have run."""
    found: Rows = {}
    yield found
    if set(found) == set(VERSIONS):
        write_table(found, TABLE)


def write_table(results: Rows, path: Path) -> None:
    """The dated table for the documentation."""
    lines = [
        "# Versions of Mooncake",
        "",
        f"{datetime.date.today().isoformat()}, written by `make test-versions`: master, store nodes and client of the "
        "same version, over TCP.",
        "",
        f"| Mooncake | {' | '.join(SUBJECTS)} |",
        f"|---|{'---|' * len(SUBJECTS)}",
        *(f"| {version} | {' | '.join(results[version].values())} |" for version in VERSIONS),
    ]
    write(path, lines)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stores_own_tests_pass_with_this_mooncake(results: Rows, version: str) -> None:
    """The version says its number; then everything that needs a real Mooncake and no engine."""
    results[version] = dict.fromkeys(SUBJECTS, "not passed")
    environment = dict(os.environ)
    if version in mooncake_versions.OTHER:
        assert runner.run([mooncake_versions.package(version)], quiet_when_done=True)
        environment |= mooncake_versions.variables_of(version)
    code = f"from importlib import metadata; print(metadata.version('{mooncake_versions.PACKAGE}'))"
    python = places.environment_python()
    said = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.strip() == version
    subjects.run(SUBJECTS, "mooncake", environment, results[version])
