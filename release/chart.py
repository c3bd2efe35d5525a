"""The chart: linted strictly and packaged, by helm itself."""

import subprocess
from pathlib import Path


def problems(helm: Path, chart: Path) -> list[str]:
    """Say what helm's strict lint finds."""
    run = subprocess.run([helm, "lint", "--strict", chart], capture_output=True, text=True, check=False)
    return [f"helm lint: {line.strip()}" for line in run.stdout.splitlines() if "[" in line] if run.returncode else []


def package(helm: Path, chart: Path, target: Path) -> Path:
    """Package the chart into a folder; return the archive.

    Raises:
        RuntimeError: with helm's own words.
    """
    run = subprocess.run([helm, "package", chart, "-d", target], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"helm package: {run.stderr.strip()}")
    (found,) = target.glob("kvshare-*.tgz")
    return found
