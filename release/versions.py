"""One version: pyproject.toml has it, and every other place is written from there.

The places are a table of patterns; a place that no longer matches is a mistake, so that none is forgotten silently.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"(\d+\.\d+\.\d+(?:-?(?:a|b|rc)\.?\d+)?)"
VERSION = re.compile(NUMBER)


@dataclass(frozen=True)
class Place:
    """Files in which a pattern's only group is the version.

    Attributes:
        glob: files, relative to the repository.
        pattern: matched line by line.
    """

    glob: str
    pattern: str


SOURCE = Place("pyproject.toml", rf'^version = "{NUMBER}"$')
PLACES = (
    Place("charts/kvshare/Chart.yaml", rf"^version: {NUMBER}$"),
    Place("charts/kvshare/Chart.yaml", rf'^appVersion: "{NUMBER}"$'),
    Place(
        "operator/kvshare_operator/cli/inject.py", rf'^DEFAULT_IMAGE = "ghcr\.io/kvshare/kvshare-connector:{NUMBER}"$'
    ),
    Place("docs/howto/*.md", rf"kvshare-(?:connector|operator):{NUMBER}"),
    Place("docs/howto/*.md", rf"kvshare-{NUMBER}\.tgz"),
    Place("docs/howto/*.md", rf"targetRevision: v{NUMBER}"),
    Place("tests/chart/testdata/default.yaml", rf"kvshare-(?:connector|operator):{NUMBER}$"),
    Place("tests/chart/testdata/default.yaml", rf"^ +app\.kubernetes\.io/version: {NUMBER}$"),
    Place("tests/chart/testdata/default.yaml", rf"^ +helm\.sh/chart: kvshare-{NUMBER}$"),
)


def version(root: Path = ROOT) -> str:
    """Return the version in pyproject.toml."""
    found: str = tomllib.loads((root / SOURCE.glob).read_text())["project"]["version"]
    return found


def differing(root: Path = ROOT) -> list[str]:
    """Return a sentence for every place that has another version, and for every pattern without a place."""
    wanted = version(root)
    problems = []
    for place in PLACES:
        found = list(_matches(root, place))
        if not found:
            problems.append(f"{place.glob}: nothing matches {place.pattern}: correct release/versions.py")
        problems.extend(
            f"{path.relative_to(root)}: has {match[1]}, {wanted} expected: run make generate"
            for path, match in found
            if match[1] != wanted
        )
    return problems


def write(root: Path = ROOT) -> list[Path]:
    """Write the version of pyproject.toml into every place; return the files that changed."""
    wanted = version(root)
    changed = []
    for place in PLACES:
        for path in sorted(root.glob(place.glob)):
            before = path.read_text()
            after = re.sub(place.pattern, lambda match: _with(match, wanted), before, flags=re.MULTILINE)
            if after != before:
                path.write_text(after)
                changed.append(path)
    return list(dict.fromkeys(changed))


def set_version(wanted: str, root: Path = ROOT) -> list[Path]:
    """Write a new version into pyproject.toml and from there everywhere.

    Raises:
        ValueError: for something that is no version.
    """
    if not VERSION.fullmatch(wanted):
        raise ValueError(
            f"version {wanted!r} given, MAJOR.MINOR.PATCH expected, with rc1 or the like behind it if need be"
        )
    path = root / SOURCE.glob
    before = path.read_text()
    path.write_text(re.sub(SOURCE.pattern, lambda match: _with(match, wanted), before, count=1, flags=re.MULTILINE))
    return [path, *write(root)]


def _matches(root: Path, place: Place) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(root.glob(place.glob)):
        for match in re.finditer(place.pattern, path.read_text(), flags=re.MULTILINE):
            yield path, match


def _with(match: re.Match[str], wanted: str) -> str:
    start, end = match.span(1)
    return match[0][: start - match.start()] + wanted + match[0][end - match.start() :]
