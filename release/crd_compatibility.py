"""Would objects and clients of the previous release still work with this definition of the resource? Pure.

The rules: what was accepted is accepted, what could be read can be read, what was defaulted is defaulted the same.
A difference that is wanted all the same is written, word for word, into ``accepted-crd-changes.txt``.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
LOWER = ("minimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a sentence for everything in a CustomResourceDefinition that could break somebody.

    Additions (fields, enum values, wider bounds, versions) are none.
    """
    found = []
    for field in ("group", "scope"):
        if old["spec"][field] != new["spec"][field]:
            found.append(f"{field}: {old['spec'][field]} became {new['spec'][field]}")
    for kind in ("plural", "kind", "singular"):
        if old["spec"]["names"][kind] != new["spec"]["names"][kind]:
            found.append(f"names.{kind}: {old['spec']['names'][kind]} became {new['spec']['names'][kind]}")
    for name in set(old["spec"]["names"].get("shortNames", ())) - set(new["spec"]["names"].get("shortNames", ())):
        found.append(f"names.shortNames: {name} was removed")
    versions = {one["name"]: one for one in new["spec"]["versions"]}
    for version in old["spec"]["versions"]:
        name = version["name"]
        if name not in versions or not versions[name]["served"]:
            found.append(f"version {name} is not served any more")
            continue
        before, after = (one["schema"]["openAPIV3Schema"] for one in (version, versions[name]))
        found.extend(f"{name}: {text}" for text in _schema(before, after, ""))
    return found


def _schema(old: Schema, new: Schema, path: str) -> Iterator[str]:
    where = path.lstrip(".") or "object"
    if old.get("type") != new.get("type") or old.get("format") != new.get("format"):
        yield f"{where}: type {_type(old)} became {_type(new)}"
        return
    yield from _values(old, new, where)
    yield from _rules(old, new, where)
    before, after = old.get("properties", {}), new.get("properties", {})
    for name in before:
        if name not in after:
            yield f"{where}: field {name} was removed"
        else:
            yield from _schema(before[name], after[name], f"{path}.{name}")
    for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        if name in before or "default" not in after.get(name, {}):
            yield f"{where}: field {name} became required"
    for field in ("items", "additionalProperties"):
        if isinstance(old.get(field), dict) and isinstance(new.get(field), dict):
            yield from _schema(old[field], new[field], f"{path}[]")


def _type(schema: Schema) -> str:
    return f"{schema.get('type')} {schema.get('format', '')}".strip()


def _values(old: Schema, new: Schema, where: str) -> Iterator[str]:
    if old.get("default") != _known_before(old, new):
        yield f"{where}: default {old.get('default')!r} became {new.get('default')!r}"
    if "enum" in new:
        for value in old.get("enum") or ["any other value"]:
            if value not in new["enum"]:
                yield f"{where}: value {value} is not accepted any more"
    for key in LOWER:
        if key in new and new[key] > old.get(key, float("-inf")):
            yield f"{where}: {key} {old.get(key)} became {new[key]}"
    for key in UPPER:
        if key in new and new[key] < old.get(key, float("inf")):
            yield f"{where}: {key} {old.get(key)} became {new[key]}"
    for key in ("pattern", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-int-or-string"):
        if old.get(key) != new.get(key):
            yield f"{where}: {key} {old.get(key)!r} became {new.get(key)!r}"


def _known_before(old: Schema, new: Schema) -> Any:
    """The new default; of an object without the fields that are new and have in it what they default to anyway."""
    default = new.get("default")
    if not isinstance(default, dict):
        return default
    fields = new.get("properties", {})
    return {
        name: value
        for name, value in default.items()
        if name in old.get("properties", {}) or fields.get(name, {}).get("default") != value
    }


def _rules(old: Schema, new: Schema, where: str) -> Iterator[str]:
    before = {rule["rule"] for rule in old.get("x-kubernetes-validations", ())}
    for rule in new.get("x-kubernetes-validations", ()):
        if rule["rule"] not in before:
            yield f"{where}: new rule: {rule.get('message', rule['rule'])}"
