"""Container images without a registry: a Debian base, the product's images, the image of engines and store.

buildah builds them from Dockerfiles whose base is an argument; each ends as an archive in the cache that
containerd imports. Names carry the key of everything that goes into the image, so a new source file is a new
image and nothing old can run by mistake.
"""

import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testbed import places, versions
from testbed.prepare.command import Commands
from testbed.prepare.debian import STORE_LIBRARIES, mirror
from testbed.prepare.python_environment import write_pip_configuration
from testbed.prepare.step import Step, key_of

BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libgomp1", *STORE_LIBRARIES)
BASE = f"localhost/kvshare-debian:{key_of(versions.DEBIAN_SUITE, BASE_PACKAGES)}"
STORAGE = places.CACHE / "buildah"
KEPT_ARCHIVES = 5
CERTIFICATES = Path("/etc/ssl/certs")


@dataclass(frozen=True)
class Image:
    """An image that is built from a Dockerfile of this repository, with the repository as its context.

    Attributes:
        name: last part of its name.
        dockerfile: path below the repository.
        inputs: files and folders below the repository that the Dockerfile copies.
    """

    name: str
    dockerfile: str
    inputs: tuple[str, ...]

    @property
    def key(self) -> str:
        """Changes with every input; looked at once, so that a file saved during a build mixes nothing up."""
        return _key(self)

    @property
    def repository(self) -> str:
        """The image's name without its tag."""
        return f"localhost/kvshare-{self.name}"

    @property
    def reference(self) -> str:
        """The image's name with its tag."""
        return f"{self.repository}:{self.key}"

    @property
    def archive(self) -> Path:
        """The finished OCI archive."""
        return places.IMAGES / f"{self.name}-{self.key}.tar"


@functools.cache
def _key(image: Image) -> str:
    return key_of(BASE, *(places.REPOSITORY / path for path in (image.dockerfile, *image.inputs)))


OPERATOR = Image(
    "operator",
    "operator/Dockerfile",
    ("pyproject.toml", "operator/kvshare_operator", "connector/kvshare_layout"),
)
CONNECTOR = Image(
    "connector",
    "connector/Dockerfile",
    ("connector/kvshare_connector", "connector/kvshare_layout"),
)
ENGINE = Image(
    "engine",
    "tests/testbed/images/engine/Dockerfile",
    (
        "tests/testbed/images/engine",
        "tests/testbed/__init__.py",
        "tests/testbed/reference_attention.py",
        "tests/testbed/pipeline_on_cpu.py",
        "tests/testbed/latent_prefixes.py",
    ),
)
PRODUCT_IMAGES = (OPERATOR, CONNECTOR)
PAUSE = Image("pause", "tests/testbed/images/pause/Dockerfile", ("tests/testbed/go/pause",))


def base_image() -> Step:
    """A step that makes the Debian base image from the machine's own package mirror."""

    def make(commands: Commands) -> None:
        with tempfile.TemporaryDirectory(dir=places.CACHE, prefix="debian-") as folder:
            root = Path(folder) / "root"
            commands.run(
                [
                    *("debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}"),
                    *(versions.DEBIAN_SUITE, root, mirror()),
                ]
            )
            for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
                shutil.rmtree(root / waste, ignore_errors=True)
            container = _buildah_answer("from", "scratch")
            commands.run([*_buildah(), "add", "--quiet", container, root, "/"])
            commands.run([*_buildah(), "commit", "--rm", "--quiet", container, BASE])

    return Step(
        name=f"Image: Debian {versions.DEBIAN_SUITE} base",
        done=lambda: _stored(BASE),
        action=make,
        remedy="run as root, with a reachable Debian mirror in /etc/apt",
    )


def image(wanted: Image, context: Path = places.REPOSITORY) -> Step:
    """A step that builds one image from the files in `context` and exports it."""

    def build(commands: Commands) -> None:
        places.IMAGES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=places.CACHE, prefix="image-") as folder:
            pip = Path(folder) / "pip.conf"
            write_pip_configuration(pip)
            mounts = ["--volume", f"{pip}:/etc/pip.conf:ro"]
            if CERTIFICATES.is_dir():
                mounts += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
            commands.run(
                [
                    *(*_buildah(), "build", "--network", "host", "--pull-never", "--no-cache", *mounts),
                    *("--build-arg", f"BASE={BASE}", "--tag", wanted.reference),
                    *("--file", places.REPOSITORY / wanted.dockerfile, context),
                ],
                environment={"BUILDAH_ISOLATION": "chroot"},
            )
            archive = Path(folder) / "archive.tar"
            target = f"oci-archive:{archive}:{wanted.reference}"
            commands.run([*_buildah(), "push", "--quiet", "--disable-compression", wanted.reference, target])
            _remove_older(wanted)
            archive.rename(wanted.archive)
            commands.run([*_buildah(), "rmi", "--force", wanted.reference])

    return Step(
        name=f"Image: {wanted.name}",
        done=lambda: wanted.archive.exists(),
        action=build,
        remedy=f"look at {wanted.dockerfile}; its commands ran with this machine's pip settings and certificates",
    )


def _remove_older(wanted: Image) -> None:
    """Keep the newest few archives: other checkouts on this machine may be about to use theirs."""
    found = sorted(places.IMAGES.glob(f"{wanted.name}-*.tar"), key=lambda file: file.stat().st_mtime)
    for file in found[:-KEPT_ARCHIVES]:
        file.unlink()


def _buildah() -> tuple[str, ...]:
    return ("buildah", "--root", str(STORAGE / "root"), "--runroot", str(STORAGE / "run"))


def _buildah_answer(*words: str) -> str:
    return subprocess.run(
        [*_buildah(), *words], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    ).stdout.strip()


def _stored(reference: str) -> bool:
    if shutil.which("buildah") is None:
        return False
    answer = subprocess.run([*_buildah(), "images", "--quiet", reference], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and bool(answer.stdout.strip())
