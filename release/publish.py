"""Publishing: what leaves the machine, as commands in the order in which a failure does least harm.

Images are built before anything is said to anybody; the tag is pushed last. What went out before a failure may be sent
again: tags of images and charts are the same for the same version.
"""

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

Command = tuple[str, ...]
REGISTRY = "ghcr.io/kvshare"
IMAGES = ("operator", "connector")


def commands(version: str) -> list[Command]:
    """Return everything that publishes a version; run from the repository's root."""
    images = {name: f"{REGISTRY}/kvshare-{name}:{version}" for name in IMAGES}
    return [
        *[("docker", "build", "-f", f"{name}/Dockerfile", "-t", image, ".") for name, image in images.items()],
        ("git", "commit", "-am", f"Release {version}"),
        ("git", "tag", "-s", f"v{version}", "-m", f"KVShare {version}"),
        *[("docker", "push", image) for image in images.values()],
        ("helm", "push", f"build/release/kvshare-{version}.tgz", f"oci://{REGISTRY}/charts"),
        ("git", "push", "origin", "main", f"v{version}"),
    ]


def afterwards(version: str) -> list[Command]:
    """Return what makes the next release compare with this one, after ``keep``."""
    return [
        ("git", "add", "release"),
        ("git", "commit", "-m", f"The next release is compared with {version}"),
        ("git", "push", "origin", "main"),
    ]


def keep(version: str, crd: Path, previous: Path, accepted: Path) -> None:
    """Keep the resource's definition as that of the previous release, and empty the list of wanted differences."""
    shutil.copy(crd, previous / f"v{version}.yaml")
    comments = [line for line in accepted.read_text().splitlines() if line.startswith("#")]
    accepted.write_text("\n".join(comments) + "\n")


def problems(version: str, target: Path, released: bool) -> list[str]:
    """Say what is missing before anything can be published."""
    wanted = [f"kvshare-{version}.tgz", f"kvshare-{version}-py3-none-any.whl", f"kvshare-{version}.cdx.json"]
    found = [f"{target / name} is missing" for name in wanted if not (target / name).is_file()]
    if not released:
        found.append(f"CHANGELOG.md has no section {version!r}")
    return found


def run(steps: Sequence[Command], root: Path, say: Callable[[str], None]) -> bool:
    """Run commands until one fails; say which, and what remains. Whether all succeeded."""
    for number, step in enumerate(steps):
        say(f"$ {shlex.join(step)}")
        try:
            failed = subprocess.run(step, cwd=root, check=False).returncode != 0
        except OSError as error:
            say(str(error))
            failed = True
        if failed:
            say("this failed; when it is mended, go on with:")
            for one in steps[number:]:
                say(f"  {shlex.join(one)}")
            return False
    return True
