"""Subjects of a table of versions: groups of the repository's own tests, run one after the other in one environment."""

import re
import subprocess
from collections.abc import Mapping, Sequence

from testbed import places

Subjects = Mapping[str, Sequence[str]]


def run(subjects: Subjects, marker: str, environment: Mapping[str, str], row: dict[str, str]) -> None:
    """Run the tests of every subject, and put pytest's summary of each into ``row``, whatever it says.

    Args:
        subjects: files and folders of tests by subject.
        marker: which of their tests.
        environment: variables of the runs.
        row: summaries by subject; `not passed` until a subject has run.

    Raises:
        AssertionError: after all have run, with the ends of the outputs of those that failed.
    """
    row.clear()
    row.update(dict.fromkeys(subjects, "not passed"))
    wrong = []
    for subject, where in subjects.items():
        ran = subprocess.run(
            [places.environment_python(), "-m", "pytest", *where, "-q", "-m", marker, "-p", "no:cacheprovider"],
            cwd=places.REPOSITORY, env=dict(environment), capture_output=True, text=True, check=False,
        )  # fmt: skip
        summary = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ran.stderr[-500:]
        row[subject] = re.sub(r"( in .*|,? ?\d+ deselected)", "", summary).strip("= ")
        if ran.returncode:
            wrong.append(ran.stdout[-6000:] + ran.stderr[-2000:])
    assert wrong == []
