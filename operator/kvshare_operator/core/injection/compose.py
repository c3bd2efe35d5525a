"""Our connector beside, or instead of, one that a pod configures already.

Why this exists: vLLM takes a list of connectors (`MultiConnector`) as JSON only, so here, and only here, the
user's own JSON value is replaced by one that contains it. Where that value cannot be replaced exactly, the
pod is refused. Pure: a container and a pool in, one changed word or a refusal out.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final, Literal, NoReturn

from kvshare_layout import config
from kvshare_operator.api.reasons import refusal
from kvshare_operator.core.commandline.flags import option_of
from kvshare_operator.core.commandline.reading import Reading
from kvshare_operator.core.injection.conflicts import ConflictError

FLAG: Final = "--kv-transfer-config"
MULTI: Final = "MultiConnector"
MOONCAKE: Final = "MooncakeStoreConnector"
_ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One word of a container: ``field`` (`command` or `args`), its place, and what must stand there."""

    field: Literal["command", "args"]
    place: int
    text: str


def composed(
    container: Mapping[str, Any], reading: Reading, mode: str, ours: config.ConnectorConfig, kv_role: str
) -> Replacement | None:
    """Return what makes the pod's own JSON flag load our connector; None when the pod has none.

    ``mode`` is the pool's `connector.onExistingConnector`. Raises ConflictError when it cannot be done.
    """
    seen = reading.arguments.get(FLAG)
    dotted = {flag.path: flag.value for flag in reading.arguments.dotted if flag.option == FLAG}
    foreign = dotted.get("kv_connector", config.CONNECTOR_CLASS) != config.CONNECTOR_CLASS
    if mode == "Refuse" or not (seen.present or foreign):
        return None
    name = str(container.get("name", ""))
    if reading.script:
        _refuse(name, " in a shell script, which tears JSON; start vLLM from command and args without a shell")
    if dotted:
        also = "as JSON and " if seen.present else ""
        _refuse(name, f" {also}with dotted flags; write all of it as one JSON value")
    found = _find(container)
    if found is None or seen.text is None or "$(" in found.text or "$$" in found.text or found.text != seen.text:
        _refuse(name, " with a value that cannot be read from command or args; write the JSON value there, in one word")
    value = _parse(name, found.text)
    wanted = _value(name, value, mode, ours, kv_role)
    if wanted == value:
        return None
    text = json.dumps(wanted, separators=(",", ":")).replace("$(", "$$(")
    word = (container.get(found.field) or [])[found.place]
    key = str(word).partition("=")[0]
    return dataclasses.replace(found, text=text if found.text == word else f"{key}={text}")


def _find(container: Mapping[str, Any]) -> Replacement | None:
    """The word that holds the flag's last value, as it is written."""
    places: list[tuple[Literal["command", "args"], int, str]] = []
    for field in ("command", "args"):
        places.extend((field, number, str(word)) for number, word in enumerate(container.get(field) or []))
    for number in range(len(places) - 1, -1, -1):
        field, place, word = places[number]
        key, equals, inline = word.partition("=")
        if option_of(key) != FLAG:
            continue
        if equals:
            return Replacement(field, place, inline)
        return Replacement(*places[number + 1]) if number + 1 < len(places) else None
    return None


def _parse(name: str, text: str) -> Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        _refuse(name, " with a value that is not JSON; correct it")
    if not isinstance(value, dict) or not isinstance(value.get("kv_connector"), str):
        _refuse(name, " without a kv_connector; correct or remove it")
    if value.get("kv_role") not in _ROLES:
        _refuse(name, f" without a kv_role ({', '.join(_ROLES)} expected); add one")
    return value


def _value(name: str, value: Json, mode: str, ours: config.ConnectorConfig, kv_role: str) -> Json:
    """The whole value that must stand there; equal to ``value`` when nothing is to be done."""
    connector = value["kv_connector"]
    if connector == MULTI:
        return _into(name, value, mode, _entry(ours, kv_role, beside=True))
    if connector == config.CONNECTOR_CLASS or (mode == "Replace" and connector == MOONCAKE):
        alone = {**_entry(ours, kv_role, beside=False), "kv_load_failure_policy": "recompute"}
        if "engine_id" in value:
            alone["engine_id"] = value["engine_id"]
        if connector == config.CONNECTOR_CLASS and value != alone:
            _refuse_copy(name)
        return alone
    _allow(name, connector, mode)
    theirs = copy.deepcopy(value)
    # MultiConnector hands its own engine_id to its children, and stops at a child that has one.
    engine = {"engine_id": theirs.pop("engine_id")} if "engine_id" in theirs else {}
    return {
        "kv_connector": MULTI,
        "kv_role": _joined(theirs["kv_role"], kv_role),
        **engine,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [theirs, _entry(ours, kv_role, beside=True)]},
    }


def _into(name: str, value: Json, mode: str, entry: Json) -> Json:
    """An existing MultiConnector with our entry in it."""
    extra = value.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, dict) else {}
    children = extra.get("connectors")
    if not isinstance(children, list) or not all(
        isinstance(child, dict) and isinstance(child.get("kv_connector"), str) for child in children
    ):
        _refuse(name, f" ({MULTI} without a list of connectors); correct it")
    kinds = [child["kv_connector"] for child in children]
    if config.CONNECTOR_CLASS in kinds:
        if [child for child in children if child["kv_connector"] == config.CONNECTOR_CLASS] != [entry]:
            _refuse_copy(name)
        if MOONCAKE in kinds:
            _refuse(name, f" ({MOONCAKE} beside KVShareConnector); remove one of them")
        wanted = list(children)
    elif mode == "Replace":
        if kinds.count(MOONCAKE) != 1:
            _refuse(name, f" ({MULTI} of {', '.join(kinds)}; Replace expects one {MOONCAKE} in it)")
        wanted = [entry if child["kv_connector"] == MOONCAKE else child for child in children]
    else:
        for kind in kinds:
            _allow(name, kind, mode)
        wanted = [*children, entry]
    return {
        **value,
        "kv_role": _joined(value["kv_role"], entry["kv_role"]),
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, "connectors": wanted},
    }


def _allow(name: str, connector: str, mode: str) -> None:
    """Whether our connector may stand beside ``connector``."""
    if mode == "Replace":
        _refuse(name, f" (connector {connector}; Replace takes the place of {MOONCAKE} only, Compose adds to others)")
    if connector == MOONCAKE:
        _refuse(name, f" (connector {MOONCAKE}, a second store; onExistingConnector: Replace takes its place)")
    if connector == MULTI:
        _refuse(name, f" ({MULTI} inside {MULTI}); use one list")


def _entry(ours: config.ConnectorConfig, kv_role: str, *, beside: bool) -> Json:
    ours = dataclasses.replace(ours, inside_multi_connector=beside)
    return {
        "kv_connector": config.CONNECTOR_CLASS,
        "kv_connector_module_path": config.CONNECTOR_MODULE,
        "kv_role": kv_role,
        "kv_connector_extra_config": config.to_extra_config(ours),
    }


def _joined(first: str, second: str) -> str:
    """The role of an engine whose connectors have these two."""
    return first if first == second else "kv_both"


def _refuse_copy(name: str) -> NoReturn:
    _refuse(name, " (KVShareConnector with other settings than the pool's; remove what was copied from another pod)")


def _refuse(name: str, problem: str) -> NoReturn:
    raise ConflictError(refusal("FlagConflict", container=name, flag=FLAG, problem=problem))
