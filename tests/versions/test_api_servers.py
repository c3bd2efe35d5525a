"""The operator's tests of the API server group, on API servers of other versions than the pinned one.

Each server is built on demand from a module of its own. Everything else stays as it is: etcd, kubectl, helm.
"""

import datetime
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import places, subjects, versions
from testbed.cluster import api_server
from testbed.kept import Rows, rows, write
from testbed.prepare import go_programs, runner

pytestmark = pytest.mark.versions

TABLE = places.REPOSITORY / "docs" / "benchmarks" / "kubernetes.md"
VERSIONS = tuple(sorted((versions.KUBERNETES, *versions.OTHER_KUBERNETES)))
SUBJECTS = {
    "schema and rules of the resource": ("tests/crd",),
    "both processes, injection, status, faults": ("tests/reconcile/test_processes.py",),
    "chart: install, upgrade, certificates, permissions": ("tests/chart",),
    "command line": ("tests/cli",),
}


@pytest.fixture(scope="module")
def results() -> Iterator[Rows]:
    """What every version's tests said; the table is written at the end, whatever it says, when all have run."""
    with rows("kubernetes") as found:
        yield found
    if set(found) == set(VERSIONS):
        write_table(found, TABLE)


def write_table(results: Rows, path: Path) -> None:
    """The dated table for the documentation."""
    lines = [
        "# Versions of Kubernetes",
        "",
        f"{datetime.date.today().isoformat()}, written by `make test-versions`: real API servers of these "
        "versions, built from their Go modules, with the operator's processes, the chart and `kvshare` as they are.",
        "",
        f"| API server | {' | '.join(SUBJECTS)} |",
        f"|---|{'---|' * len(SUBJECTS)}",
        *(f"| {version} | {' | '.join(results[version].values())} |" for version in VERSIONS),
    ]
    write(path, lines)


@pytest.mark.parametrize("version", VERSIONS)
def test_operators_tests_pass_on_this_api_server(results: Rows, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The server says its version; then the tests that need one, subject by subject."""
    results[version] = dict.fromkeys(SUBJECTS, "not passed")
    if version != versions.KUBERNETES:
        build = go_programs.OTHER_API_SERVERS[version]
        assert runner.run([go_programs.go(), go_programs.build_step(build)], quiet_when_done=True)
        monkeypatch.setenv(go_programs.API_SERVER_VERSION, version)
    with tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder, api_server(Path(folder) / "s") as api:
        assert f'"gitVersion": "{version}"' in api.kubectl.run("get", "--raw", "/version")
    subjects.run(SUBJECTS, "apiserver", os.environ, results[version])
