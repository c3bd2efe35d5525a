"""`python -m release check | prepare VERSION | publish | version`: behind the verbs of the Makefile."""

import argparse
import datetime
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from release import changelog, chart, crd_compatibility, dependencies, publish, versions, wheel
from testbed.prepare.go_programs import program

ROOT = versions.ROOT
TARGET = ROOT / "build" / "release"
PREVIOUS = ROOT / "release" / "previous"
ACCEPTED = ROOT / "release" / "accepted-crd-changes.txt"
CRD = ROOT / "crds" / "kvshare.dev_kvsharepools.yaml"
DONE = """
All checks passed; artefacts are in build/release. After `make release`, look at `git diff`; then `make publish` runs:

{commands}
"""


def main(arguments: list[str]) -> int:
    """Run one verb; 0 when everything is right."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check", help="build and check everything that a release consists of")
    verbs.add_parser("prepare", help="set the version, date the changelog, then check").add_argument("version")
    verbs.add_parser("publish", help="push images, chart and tag of what was prepared")
    verbs.add_parser("version", help="write pyproject.toml's version everywhere").add_argument(
        "--check", action="store_true"
    )
    chosen = parser.parse_args(arguments)
    if chosen.verb == "version":
        return _version(check=chosen.check)
    if chosen.verb == "publish":
        return _publish()
    if chosen.verb == "prepare":
        try:
            _prepare(chosen.version)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    return _check()


def _version(*, check: bool) -> int:
    if check:
        problems = versions.differing()
        for problem in problems:
            print(problem)
        return 1 if problems else 0
    for path in versions.write():
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def _prepare(version: str) -> None:
    told = changelog.released(changelog.read(ROOT), version, datetime.datetime.now(datetime.UTC).date())
    for path in versions.set_version(version):
        print(f"wrote {path.relative_to(ROOT)}")
    (ROOT / "CHANGELOG.md").write_text(told)
    subprocess.run([sys.executable, ROOT / "docs" / "generate.py"], check=True)


def _check() -> int:
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir(parents=True)
    version = versions.version()
    checks: tuple[tuple[str, Callable[[], list[str]]], ...] = (
        ("one version everywhere", versions.differing),
        ("changelog tells about it", lambda: changelog.problems(changelog.read(ROOT), version)),
        ("wheel is pure and complete", lambda: _wheel(version)),
        ("payload has no compiled files", lambda: compiled_payload(_tracked())),
        ("licences of dependencies", lambda: dependencies.licence_problems(dependencies.closure(ROOT))),
        ("SBOM", lambda: _sbom(version)),
        ("chart", _chart),
        ("resource fits the previous release", resource_problems),
    )
    failed = False
    for name, run in checks:
        problems = run()
        print(f"{'FAILED' if problems else 'ok':<8}{name}")
        for problem in problems:
            print(f"        {problem}")
        failed = failed or bool(problems)
    if failed:
        return 1
    print(DONE.format(commands="\n".join(f"  {shlex.join(one)}" for one in publish.commands(version))))
    return 0


def _publish() -> int:
    version = versions.version()
    released = changelog.section(changelog.read(ROOT), version) is not None
    if missing := publish.problems(version, TARGET, released):
        print("\n".join([*missing, f"make release VERSION={version} first"]), file=sys.stderr)
        return 2
    if not publish.run(publish.commands(version), ROOT, print):
        return 1
    publish.keep(version, CRD, PREVIOUS, ACCEPTED)
    if not publish.run(publish.afterwards(version), ROOT, print):
        return 1
    print(f"published {version}; attach build/release/* to the release of the tag v{version}")
    return 0


def _tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


def _wheel(version: str) -> list[str]:
    try:
        built = wheel.build(ROOT, TARGET)
    except RuntimeError as error:
        return [str(error)]
    problem = wheel.import_problem(built)
    return [*wheel.problems(built, ROOT, version, _tracked()), *([problem] if problem else [])]


def compiled_payload(tracked: set[str]) -> list[str]:
    """Say which tracked files of the connector's image are no source: the image is the same for every machine."""
    payload = [
        name for name in tracked if name.startswith(("connector/kvshare_layout/", "connector/kvshare_connector/"))
    ]
    return [
        f"{name}: only Python source and py.typed expected"
        for name in sorted(payload)
        if not name.endswith((".py", "py.typed"))
    ]


def _sbom(version: str) -> list[str]:
    text = dependencies.sbom(dependencies.closure(ROOT), version, datetime.datetime.now(datetime.UTC))
    (TARGET / f"kvshare-{version}.cdx.json").write_text(text)
    return []


def _chart() -> list[str]:
    helm = Path(program("helm"))
    found = chart.problems(helm, ROOT / "charts" / "kvshare")
    if not found:
        chart.package(helm, ROOT / "charts" / "kvshare", TARGET)
    return found


def resource_problems() -> list[str]:
    """Compare with the newest definition of ``previous/``; wanted differences stand in ``accepted-crd-changes.txt``."""
    accepted = {line.strip() for line in ACCEPTED.read_text().splitlines() if line.strip() and not line.startswith("#")}
    last = former()
    old, new = (yaml.safe_load(path.read_text()) for path in (last, CRD))
    return [f"{last.stem}: {text}" for text in crd_compatibility.differences(old, new) if text not in accepted]


def former() -> Path:
    """The definition of the newest release that is kept."""
    return max(PREVIOUS.glob("v*.yaml"), key=lambda path: [int(part) for part in path.stem[1:].split(".")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
