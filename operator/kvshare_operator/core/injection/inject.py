"""The injection itself: (pod, pool, settings) -> injected pod or refusal.

Why this exists: webhook, command line and tests call this one pure function. It is all or nothing: every
check runs before the copy is changed, and a refusal leaves nothing behind. Run on its own output it changes
nothing. It only adds: what it does not know, it does not touch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from kvshare_layout import config
from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.commandline.reading import Opening, Reading, read_container
from kvshare_operator.core.injection import arguments, compose, conflicts, delivery, surroundings
from kvshare_operator.core.injection.conflicts import ConflictError
from kvshare_operator.core.injection.container import choose_container
from kvshare_operator.core.injection.optin import OptIn, misspelled, read_opt_in
from kvshare_operator.core.injection.record import Record
from kvshare_operator.core.injection.settings import InjectionSettings
from kvshare_operator.core.pool.view import PoolView

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Injected:
    """A pod that may join: the whole pod after injection, its record, and what its author should know."""

    pod: Json
    record: Record
    warnings: tuple[str, ...] = ()


def inject(
    pod: Mapping[str, Any], pool: PoolView, settings: InjectionSettings, services: Collection[str] = ()
) -> Injected | Refusal:
    """Inject ``pool`` into ``pod``, which has opted into it. ``pod`` itself is never changed.

    ``services`` are names of Services in the pod's namespace, as far as they are known.
    """
    try:
        outcome = _inject(pod, pool, settings, services)
    except ConflictError as error:
        return error.refusal
    if isinstance(outcome, Refusal):
        return outcome
    return dataclasses.replace(outcome, warnings=(*outcome.warnings, *misspelled(pod)))


def _inject(
    pod: Mapping[str, Any], pool: PoolView, settings: InjectionSettings, services: Collection[str]
) -> Injected | Refusal:
    opt_in = read_opt_in(pod)
    if isinstance(opt_in, Refusal):
        return opt_in
    if pool.resolution.mistakes:
        problem = "; ".join(mistake.message.rstrip(".") for mistake in pool.resolution.mistakes)
        return refusal("PoolNotReady", pool=pool.name, problem=problem)
    if pool.spec.connector.source != "Image" and not pool.connector_image:
        problem = "connector.image is not set and the operator has no default image"
        return refusal("PoolNotReady", pool=pool.name, problem=problem)
    opening = Opening(opt_in.forwards_args, settings.known_images)
    number = choose_container(pod, opt_in.container, opening)
    if isinstance(number, Refusal):
        return number
    result: Json = copy.deepcopy(dict(pod))
    container: Json = result["spec"]["containers"][number]
    reading = read_container(container, opening)
    if pool.spec.connector.source != "Image" and isinstance(reading, Reading):
        conflicts.python_path(container, reading)
    if opt_in.group_worker and (isinstance(reading, Refusal) or not reading.serves):
        return _worker(result, container, pool, opt_in, settings)
    if isinstance(reading, Refusal):
        return reading
    if reading.way == "none":
        return _worker(result, container, pool, opt_in, settings)
    try:
        dotted = arguments.dotted_flags(pool, opt_in.role, settings, opt_in.network_devices)
    except ValueError as error:
        return refusal("PoolNotReady", pool=pool.name, problem=str(error))
    mode = pool.spec.connector.on_existing_connector
    ours = arguments.connector_config(pool, opt_in.role, settings, opt_in.network_devices)
    replaced = compose.composed(container, reading, mode, ours, config.kv_role_of(opt_in.role))
    taken_in = mode != "Refuse" and reading.arguments.get(compose.FLAG).present
    if taken_in:
        dotted = ()
    tp, warnings = conflicts.check(container, reading, opt_in, pool, dotted, taken_in=taken_in)
    ranks = tp * (reading.arguments.get("--pipeline-parallel-size").number() or 1)
    around = surroundings.memory_warnings(container, ours, ranks)
    around.extend(surroundings.device_warnings(pool, opt_in.network_devices, ranks))
    around.extend(surroundings.link_warnings(pod, container, services))
    more = _deliver(result, container, pool, opt_in, settings)
    delivery.add_report_access(result, container, settings)
    delivery.add_rdma(container, pool)
    if replaced is not None:
        container[replaced.field][replaced.place] = replaced.text
    _add_flags(container, reading, arguments.missing_flags(reading.arguments, pool, dotted))
    record = _record(container, pool, opt_in.role, tp)
    _mark(result, record, settings)
    return Injected(result, record, (*warnings, *around, *more))


def _deliver(
    result: Json, container: Json, pool: PoolView, opt_in: OptIn, settings: InjectionSettings
) -> tuple[str, ...]:
    return tuple(delivery.add_payload(result, container, pool, opt_in, settings))


def _worker(result: Json, container: Json, pool: PoolView, opt_in: OptIn, settings: InjectionSettings) -> Injected:
    """A worker of a group: its leader carries the flags, but the engine's code runs here too."""
    warnings = _deliver(result, container, pool, opt_in, settings)
    delivery.add_rdma(container, pool)
    record = _record(container, pool, "worker", None)
    _mark(result, record, settings, reports=False)
    return Injected(result, record, warnings)


def _add_flags(container: Json, reading: Reading, flags: tuple[str, ...]) -> None:
    if reading.way == "variable":
        delivery.add_variable(container, " ".join(flags))
    elif flags:
        container["args"] = [*(container.get("args") or []), *reading.filler, *flags]


def _record(container: Json, pool: PoolView, role: str, tp: int | None) -> Record:
    return Record(
        pool=pool.name,
        revision=pool.revision,
        store_tp=pool.resolution.store_tp,
        local_tp=tp,
        role=role,
        container=str(container.get("name")),
        cache_namespace=pool.resolution.cache_namespace,
    )


def _mark(result: Json, record: Record, settings: InjectionSettings, *, reports: bool = True) -> None:
    metadata = result["metadata"]
    labels = {**(metadata.get("labels") or {}), names.MEMBER: record.pool}
    annotations = {**(metadata.get("annotations") or {}), names.INJECTED: record.to_json()}
    if reports and settings.report_url:
        annotations[names.REPORT_CA] = settings.report_ca
    metadata["labels"], metadata["annotations"] = labels, annotations
