"""`python3 -m testbed.groups fast apiserver engine node`: run groups of tests, each prepared and timed.

Standard library only: it runs on the machine's own Python, before the environment exists.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from testbed import places
from testbed.prepare import runner
from testbed.prepare.plan import PLANS
from testbed.prepare.step import UnpreparableError


@dataclass(frozen=True)
class Group:
    """Tests that need the same things.

    Attributes:
        plan: the preparation plan.
        marker: which pytest markers it selects.
        seconds: time limit of one test; a hanging engine must not eat the group's time.
        profile: how Hypothesis looks for counter-examples, see `tests/conftest.py`.
    """

    plan: str
    marker: str
    seconds: int
    profile: str = "quick"


MARKERS = ("apiserver", "mooncake", "engine", "node", "scenario", "matrix", "faults", "versions")
"""Tests that need more than Python packages carry one of these."""

_ONLY_PACKAGES = f"not ({' or '.join(MARKERS)})"

GROUPS = {
    "fast": Group("fast", _ONLY_PACKAGES, 60),
    "properties": Group("fast", f"hypothesis and {_ONLY_PACKAGES}", 1800, "thorough"),
    "apiserver": Group("apiserver", "apiserver", 120),
    "engine": Group("engine", "engine or mooncake", 600),
    "node": Group("node", "node", 1200),
    "matrix": Group("engine", "matrix", 3600),
    "faults": Group("engine", "faults", 900),
    "versions": Group("versions", "versions", 1800),
    "scenario": Group("node", "scenario", 1200),
}

ENDINGS = {1: "tests failed", 2: "interrupted", 3: "pytest broke", 4: "wrong use of pytest", 5: "no tests found"}


def run_group(name: str) -> str:
    """Prepare and run one group; an empty text when all its tests passed, else what went wrong."""
    group = GROUPS[name]
    print(f"\n=== {name}: preparation", flush=True)
    try:
        prepared = runner.run(PLANS[group.plan](), quiet_when_done=True)
    except UnpreparableError as error:
        print(error, file=sys.stderr, flush=True)
        prepared = False
    if not prepared:
        return "preparation failed"
    print(f"=== {name}: tests", flush=True)
    python = places.environment_python()
    report = places.REPOSITORY / "build" / "junit" / f"{name}.xml"
    options = [f"--timeout={group.seconds}", f"--junitxml={report}"]
    command = [str(python), "-m", "pytest", "-m", group.marker, *options, "tests"]
    environment = {"HYPOTHESIS_PROFILE": group.profile} | os.environ
    code = subprocess.run(command, cwd=places.REPOSITORY, env=environment, check=False).returncode
    return "" if code == 0 else ENDINGS.get(code, f"pytest ended with code {code}")


def main() -> int:
    """Run the named groups one after the other, all of them even when one fails."""
    parser = argparse.ArgumentParser(prog="python3 -m testbed.groups", description=__doc__)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    wanted: list[str] = parser.parse_args().groups
    results = []
    for name in wanted:
        start = time.monotonic()
        problem = run_group(name)
        results.append((name, time.monotonic() - start, problem))
        print(f"=== {name}: {results[-1][1]:.0f} s, {problem or 'passed'}", flush=True)
    if len(results) > 1:
        print("\n=== all groups")
        for name, seconds, problem in results:
            print(f"    {name:<12}{seconds:>6.0f} s   {problem or 'passed'}")
    return 1 if any(problem for _, _, problem in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
