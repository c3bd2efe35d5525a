"""Debian packages, and what the machine's own package sources say about mirrors.

No mirror is named here: the base image comes from wherever the machine gets its packages.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed import versions
from testbed.prepare.command import Commands
from testbed.prepare.step import Step, UnpreparableError

STORE_LIBRARIES = ("libibverbs1", "librdmacm1", "libnuma1", "libcurl4")
"""What Mooncake's master and client link to."""

ENGINE_PACKAGES = ("gcc", "g++", *STORE_LIBRARIES)
API_SERVER_PACKAGES = ("openssl",)
NODE_PACKAGES = (
    "buildah",
    "debootstrap",
    "containernetworking-plugins",
    "iptables",
    "iproute2",
    "util-linux",
    "libseccomp-dev",
    "pkg-config",
)

APT_SOURCES = Path("/etc/apt")


def packages(names: Sequence[str]) -> Step:
    """A step that installs the missing ones of these Debian packages."""

    def install(commands: Commands) -> None:
        if os.geteuid() != 0:
            raise UnpreparableError(f"missing Debian packages: {' '.join(missing(names))}; only root can install them")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        lock = ("-o", "DPkg::Lock::Timeout=600")
        commands.run(["apt-get", *lock, "update"], environment=quiet)
        commands.run(
            ["apt-get", *lock, "install", "-y", "--no-install-recommends", *missing(names)],
            environment=quiet,
        )

    return Step(
        name="Debian packages: " + " ".join(names),
        done=lambda: not missing(names),
        action=install,
        remedy="run as root on Debian 12 with working package sources (try `apt-get update`)",
    )


def missing(names: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed, in the given order.

    Raises:
        UnpreparableError: if this is no Debian.
    """
    if shutil.which("dpkg-query") is None:
        raise UnpreparableError("there is no dpkg-query: the test bed needs Debian 12")
    answer = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *names],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    present = {line.split()[1] for line in answer.splitlines() if line.startswith("installed ")}
    return [name for name in names if name not in present]


@dataclass(frozen=True)
class Source:
    """One package source: where, which suites, which components."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]


def mirror(folder: Path = APT_SOURCES) -> str:
    """The address from which this machine gets the base image's Debian release.

    Raises:
        UnpreparableError: if no configured source has it.
    """
    for source in sources(folder):
        if versions.DEBIAN_SUITE in source.suites and "main" in source.components:
            return source.uri
    raise UnpreparableError(
        f"no package source for `{versions.DEBIAN_SUITE} main` in {folder}: add one, the base image is made of it"
    )


def sources(folder: Path) -> Iterator[Source]:
    """The `deb` sources of an apt configuration folder, both file formats."""
    lists = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*.list"))]
    for file in lists:
        if file.exists():
            yield from _one_line_sources(file.read_text())
    for file in sorted((folder / "sources.list.d").glob("*.sources")):
        yield from _stanza_sources(file.read_text())


def _one_line_sources(text: str) -> Iterator[Source]:
    for line in text.splitlines():
        words = re.sub(r"\[[^]]*\]", " ", line.split("#")[0]).split()
        if len(words) >= 3 and words[0] == "deb":
            yield Source(words[1], (words[2],), tuple(words[3:]))


def _stanza_sources(text: str) -> Iterator[Source]:
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", kept):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields.setdefault(name, []).extend(line.split())
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.split()
        if "deb" in fields.get("types", ()) and fields.get("enabled", ["yes"]) != ["no"]:
            for uri in fields.get("uris", ()):
                yield Source(uri, tuple(fields.get("suites", ())), tuple(fields.get("components", ())))
