"""The wheel: built, and looked into. It must be pure, complete, free of dependencies, and hold nothing else."""

import email
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = {"kvshare_layout": "connector", "kvshare_connector": "connector", "kvshare_operator": "operator"}
"""Package -> folder of the repository that holds it."""
COMPILED = (".so", ".pyd", ".dll", ".dylib", ".pyc", ".pyo", ".a", ".o")


def build(root: Path, target: Path) -> Path:
    """Build the wheel into a folder; return its path. Nothing is fetched.

    Raises:
        RuntimeError: with the builder's own words.
    """
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"the wheel cannot be built: {run.stdout}{run.stderr}")
    (found,) = target.glob("kvshare-*.whl")
    return found


def problems(wheel: Path, root: Path, version: str, tracked: set[str]) -> list[str]:
    """Say what is wrong with a wheel. ``tracked`` are the repository's own files, relative to its root."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"kvshare-{version}.dist-info"
        found = [
            f"{wheel.name}: no {info}/{name}"
            for name in ("METADATA", "RECORD", "entry_points.txt")
            if f"{info}/{name}" not in names
        ]
        if found:
            return found
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    if not wheel.name.endswith("-py3-none-any.whl"):
        found.append(f"{wheel.name}: a wheel for every machine (py3-none-any) expected")
    found.extend(f"{wheel.name}: compiled file {name}" for name in sorted(names) if name.endswith(COMPILED))
    for package, folder in PACKAGES.items():
        wanted = {
            path.removeprefix(f"{folder}/")
            for path in tracked
            if path.startswith(f"{folder}/{package}/") and (root / path).exists()
        }
        held = {name for name in names if name.startswith(f"{package}/")}
        found.extend(f"{wheel.name}: {name} is missing" for name in sorted(wanted - held))
        found.extend(f"{wheel.name}: {name} is no file of the repository" for name in sorted(held - wanted))
    outside = {name for name in names if name.split("/")[0] not in {*PACKAGES, info}}
    found.extend(f"{wheel.name}: {name} does not belong into it" for name in sorted(outside))
    needed = [text for text in metadata.get_all("Requires-Dist") or [] if "extra ==" not in text]
    found.extend(f"{wheel.name}: needs {text}, nothing expected: it must not move an image's torch" for text in needed)
    if metadata["License-Expression"] != "Apache-2.0" or not any(name.endswith("/LICENSE") for name in names):
        found.append(f"{wheel.name}: licence Apache-2.0 with its text expected")
    if "kvshare = kvshare_operator.cli.main:main" not in entry_points:
        found.append(f"{wheel.name}: the command kvshare is missing")
    return found


def import_problem(wheel: Path) -> str | None:
    """Import the protocol from the wheel alone, without site packages, and with warnings as errors."""
    code = f"import sys; sys.path.insert(0, {str(wheel)!r})\nimport kvshare_layout.verdict, kvshare_layout.config"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    return f"{wheel.name}: kvshare_layout does not import from it: {run.stderr.strip()}" if run.returncode else None
