"""Other versions of Mooncake beside the pinned one: a folder each, which takes its place on PYTHONPATH."""

from pathlib import Path

from testbed import places
from testbed.prepare.command import Commands
from testbed.prepare.python_environment import UV, uv_settings
from testbed.prepare.step import Step

PACKAGE = "mooncake-transfer-engine-non-cuda"
OTHER = {"0.3.13": "nvidia-cuda-runtime-cu12==12.9.79"}
"""The newest version but one, and what it needs; the newest is pinned, and older ones are not supported. The build of
0.3.13 for machines without CUDA was published with a link to CUDA's runtime all the same."""


def folder_of(version: str) -> Path:
    """Where a version lies."""
    return places.CACHE / "mooncake-versions" / f"{version}-with-runtime"


def variables_of(version: str) -> dict[str, str]:
    """The environment variables with which a version takes the place of the pinned one."""
    runtime = folder_of(version) / "nvidia" / "cuda_runtime" / "lib"
    return {"PYTHONPATH": str(folder_of(version)), "LD_LIBRARY_PATH": str(runtime)}


def package(version: str) -> Step:
    """A step that unpacks the package of a version, without what it depends on."""
    folder = folder_of(version)

    def take(commands: Commands) -> None:
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        install = (UV, "pip", "install", "--python", places.environment_python(), "--no-deps", "--target", unfinished)
        commands.run([*install, f"{PACKAGE}=={version}", OTHER[version]], environment=uv_settings())
        unfinished.rename(folder)

    return Step(
        name=f"Mooncake {version}",
        done=folder.exists,
        action=take,
        remedy=f"check the package index; deleting {folder} starts afresh",
    )
