"""What the product's images and commands bring along: the closure of our extras, its licences, its SBOM.

Versions are those of the environment that the tests run in; an image built later may have newer ones within the
bounds of pyproject.toml.
"""

import datetime
import functools
import json
import tomllib
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from license_expression import ExpressionError, Licensing, get_spdx_licensing
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("operator", "check")
"""Extras whose closure is shipped in an image, or installed with the command. Mooncake comes with people's images."""
ALLOWED = frozenset(
    {
        "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0",
        "Python-2.0", "Unlicense", "Zlib",
    }
)  # fmt: skip
"""Licences that Apache-2.0 software may be shipped with, without further duties than naming them."""
CLASSIFIERS = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
}
WORDS = {
    "BSD": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "MIT License": "MIT",
    "PSF": "PSF-2.0",
}


@dataclass(frozen=True)
class Package:
    """One distribution. ``licence`` is an SPDX expression; None when it says none that is known."""

    name: str
    version: str
    licence: str | None
    needs: tuple[str, ...]


def closure(root: Path, extras: tuple[str, ...] = EXTRAS) -> dict[str, Package]:
    """Return everything that our extras bring along, by normalised name, as installed here.

    Raises:
        metadata.PackageNotFoundError: something of it is not installed: `make prepare`.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    waiting = [Requirement(text) for extra in extras for text in project[extra]]
    found: dict[str, Package] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name == "kvshare":
            waiting.extend(Requirement(text) for extra in wanted.extras for text in project[extra])
            continue
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        distribution = metadata.distribution(wanted.name)
        needed = [
            one
            for text in distribution.requires or []
            if (one := Requirement(text)).marker is None
            or any(one.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras))
        ]
        waiting.extend(needed)
        needs = {canonicalize_name(one.name) for one in needed} | set(found[name].needs if name in found else ())
        found[name] = Package(name, distribution.version, licence_of(distribution.metadata), tuple(sorted(needs)))
    return dict(sorted(found.items()))


def licence_of(about: metadata.PackageMetadata) -> str | None:
    """Return a distribution's SPDX expression: its own, one that a word or a classifier means, or None."""
    values = about.json
    for text in (values.get("license_expression"), values.get("license")):
        if isinstance(text, str) and len(text) < 100 and (known := _spdx(WORDS.get(text.strip(), text.strip()))):
            return known
    classifiers = [text.split(" :: ")[-1] for text in values.get("classifier") or [] if text.startswith("License :: ")]
    known_ones = sorted({CLASSIFIERS[text] for text in classifiers if text in CLASSIFIERS})
    return " OR ".join(known_ones) or None


@functools.cache
def _licensing() -> Licensing:
    """The parser of licence expressions; making it reads the whole list of licences."""
    return get_spdx_licensing()


def _spdx(text: str) -> str | None:
    try:
        return str(_licensing().parse(text, validate=True, strict=True)) or None
    except ExpressionError:
        return None


def licence_problems(packages: dict[str, Package]) -> list[str]:
    """Say which packages cannot be shipped: no known licence, or none that is allowed."""
    found = []
    for package in packages.values():
        if package.licence is None:
            found.append(
                f"{package.name} {package.version}: no known licence: look, and add it to release/dependencies.py"
            )
        elif not _allowed(package.licence):
            found.append(
                f"{package.name} {package.version}: licence {package.licence} is not in release/dependencies.py"
            )
    return found


def _allowed(expression: str) -> bool:
    licensing = _licensing()
    parsed = licensing.parse(expression)
    known = {one: licensing.TRUE if str(one) in ALLOWED else licensing.FALSE for one in parsed.symbols}
    return bool(parsed.subs(known).simplify() == licensing.TRUE)


def sbom(packages: dict[str, Package], version: str, time: datetime.datetime) -> str:
    """Return a CycloneDX 1.6 document, as JSON, that has been validated against its schema.

    Raises:
        ValueError: if it does not fit its schema.
    """
    factory = LicenseFactory()
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"kvshare {version} {sorted(map(str, packages.values()))}"))
    root = Component(
        name="kvshare", version=version, type=ComponentType.APPLICATION, bom_ref="kvshare",
        licenses=[factory.make_from_string("Apache-2.0")],
    )  # fmt: skip
    bom.metadata.component, bom.metadata.timestamp = root, time
    components = {
        name: Component(
            name=name, version=package.version, type=ComponentType.LIBRARY, bom_ref=name,
            purl=PackageURL("pypi", None, name, package.version),
            licenses=[factory.make_from_string(package.licence)] if package.licence else [],
        )
        for name, package in packages.items()
    }  # fmt: skip
    for component in components.values():
        bom.components.add(component)
    needed = {name for package in packages.values() for name in package.needs}
    bom.register_dependency(root, [component for name, component in components.items() if name not in needed])
    for name, package in packages.items():
        bom.register_dependency(components[name], [components[one] for one in package.needs if one in components])
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"the SBOM does not fit its schema: {problem}")
    json.loads(text)
    return text + "\n"
