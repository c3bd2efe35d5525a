"""The status of a pool from everything that was gathered about it.

Why this exists: one pure function from a frozen input to the whole status, so that every sentence of
`kubectl describe kvsharepool` has a test without a cluster. Reads no clock: the time is part of the input.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.pool import Spec, SpecError, read_spec
from kvshare_operator.api.reasons import refusal
from kvshare_operator.api.status import Status, read_status
from kvshare_operator.core.pool.census import Census, some
from kvshare_operator.core.pool.conditions import ConditionStatus, Finding, from_refusal, to_conditions
from kvshare_operator.core.pool.members import Member
from kvshare_operator.core.pool.resolve import Resolution, resolve
from kvshare_operator.core.pool.revision import revision
from kvshare_operator.core.pool.view import connector_image
from kvshare_operator.core.server_version import Version, image_volume_problem
from kvshare_operator.core.store.health import StoreState, managed_finding

FIELD_WORDS: Final = {
    "hash_canary": "hash seed (hash_canary; PYTHONHASHSEED)",
    "hash_scheme": "way of hashing blocks (hash_scheme; another vLLM version)",
    "model_config": "model configuration (model_config)",
    "weights": "weights",
}
"""Fields of a member's manifest -> what people call them, where the name says too little."""


@dataclasses.dataclass(frozen=True)
class Reach:
    """Whether the store's master answered the operator: True, False, or None when it was not tried."""

    reached: bool | None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Everything about one pool at one moment.

    Attributes:
        pool: the raw object.
        members: all pods that opted in and are not over, with and without record.
        reach: the store's master, as seen from the operator.
        default_image: payload image where the spec names none.
        now: the time, with zone.
        server_version: (major, minor) of the cluster, None when it cannot be read.
        store: the managed store; None with an external one, or where none is managed.
    """

    pool: Mapping[str, Any]
    members: tuple[Member, ...]
    reach: Reach
    default_image: str
    now: datetime.datetime
    server_version: Version | None = None
    store: StoreState | None = None


@dataclasses.dataclass(frozen=True)
class Judged:
    """The status that a pool should have, and what is true of its members; no census for a spec that is invalid."""

    status: Status
    census: Census | None


def next_status(gathered: Gathered) -> Status:
    """Return the status that the pool should have."""
    return judge(gathered).status


def judge(gathered: Gathered) -> Judged:
    """Judge a pool and its members."""
    before = read_status(gathered.pool.get("status"))
    metadata = gathered.pool.get("metadata") or {}
    namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
    generation = int(metadata.get("generation") or 0)
    try:
        spec = read_spec(gathered.pool.get("spec"))
    except SpecError as error:
        return Judged(_invalid(before, error, generation, gathered.now), None)
    kv_heads = spec.model.kv_heads or _reported_heads(gathered.members) or before.kv_heads
    resolution = resolve(namespace, name, spec, before.model_copy(update={"kv_heads": kv_heads}))
    image = connector_image(spec, before, generation, gathered.default_image)
    code = revision(spec, resolution, image)
    census = Census(namespace, resolution, code, gathered.members)
    findings = _findings(spec, resolution, gathered, census)
    status = Status(
        observed_generation=generation,
        store_tp_size=resolution.store_tp if resolution.store_tp is not None else before.store_tp_size,
        kv_heads=kv_heads,
        cache_namespace=resolution.cache_namespace,
        revision=code,
        connector_image=image if image and spec.connector.source != "Image" else None,
        members=census.counts(),
        fingerprints=census.fingerprints(),
        problems=census.problems(),
        conditions=to_conditions(findings, before.conditions or [], generation, gathered.now),
    )
    return Judged(status, census)


def _invalid(before: Status, error: SpecError, generation: int, now: datetime.datetime) -> Status:
    """An object that was stored under looser rules: said, and nothing else of the status is touched."""
    refused = refusal("SpecInvalid", problem=str(error))
    findings = [from_refusal(names.ACCEPTED, refused), from_refusal(names.READY, refused)]
    kept = [c for c in before.conditions or [] if c.type not in (names.ACCEPTED, names.READY)]
    conditions = to_conditions(findings, before.conditions or [], generation, now)
    return before.model_copy(update={"observed_generation": generation, "conditions": [*conditions, *kept]})


def _reported_heads(members: Iterable[Member]) -> int | None:
    """The number of KV heads that most members report; the smaller number on a tie, so that it never flaps."""
    votes = collections.Counter(m.report.kv_heads for m in members if m.report and m.report.kv_heads)
    return min(votes, key=lambda value: (-votes[value], value)) if votes else None


def _findings(spec: Spec, resolution: Resolution, gathered: Gathered, census: Census) -> list[Finding]:
    wrong = [mistake for mistake in resolution.mistakes if mistake.code != "StoreTPConflict"]
    if spec.connector.source == "ImageVolume":
        wrong.extend(filter(None, [image_volume_problem(gathered.server_version)]))
    conflict = next((m for m in resolution.mistakes if m.code == "StoreTPConflict"), None)
    if wrong:
        accepted = from_refusal(names.ACCEPTED, wrong[0])
    elif conflict is not None:
        accepted = from_refusal(names.ACCEPTED, conflict)
    else:
        notes = [text for text in resolution.warnings if "provisional" not in text]
        accepted = Finding(names.ACCEPTED, "True", "Accepted", "; ".join(notes) or "the pool can be used")
    if conflict is not None:
        resolved = from_refusal(names.STORE_TP_RESOLVED, conflict)
    else:
        resolved = _resolved(spec, resolution)
    if spec.store.type == "Managed":
        reach = gathered.reach
        reachable = managed_finding(gathered.store, resolution.master_address or "", reach.reached, reach.problem)
    else:
        reachable = _reachable(resolution, gathered.reach)
    consistent = _consistent(census)
    first = next((f for f in (accepted, resolved, reachable) if f.status != "True"), None)
    if first is not None:
        ready = Finding(names.READY, "False", first.reason, first.message)
    else:
        ready = Finding(names.READY, "True", "Ready", "engines that opt in are injected")
    return [accepted, resolved, reachable, consistent, ready]


def _resolved(spec: Spec, resolution: Resolution) -> Finding:
    sizes = ", ".join(map(str, spec.listed_sizes()))
    how = {
        "pinned": "pinned by spec.storeTPSize",
        "lcm": f"the least common multiple of the effective sizes of TP {sizes}",
        "sticky": f"kept from before; it fits TP {sizes}",
    }[resolution.source]
    known = f"{resolution.kv_heads} KV heads" if resolution.kv_heads else "provisional: KV heads not known yet"
    reason = "Provisional" if resolution.provisional else resolution.source.capitalize()
    return Finding(names.STORE_TP_RESOLVED, "True", reason, f"Store TP {resolution.store_tp}: {how} ({known})")


def _reachable(resolution: Resolution, reach: Reach) -> Finding:
    if resolution.master_address is None or reach.reached is None:
        return Finding(names.STORE_REACHABLE, "Unknown", "NotTried", "the store's master was not tried yet")
    if reach.reached:
        message = f"{resolution.master_address} answers the operator"
        return Finding(names.STORE_REACHABLE, "True", "Reachable", message)
    refused = refusal("StoreUnreachable", address=resolution.master_address, problem=reach.problem)
    return from_refusal(names.STORE_REACHABLE, refused)


def _consistent(census: Census) -> Finding:
    """One finding about all members: the worst thing first."""
    kind = names.MEMBERS_CONSISTENT
    if len(census.groups) > 1:
        fields = ", ".join(FIELD_WORDS.get(name, name) for name in census.split_fields())
        fields = fields or "fields that were not reported"
        return from_refusal(kind, refusal("FingerprintSplit", count=len(census.groups), fields=fields))
    apart = [m for m in census.injected if m.report is not None and m.report.verdict != "shared"]
    if apart:
        why = sorted({f"{m.owner.text} ({m.report.reason})" for m in apart if m.report})
        return from_refusal(kind, refusal("MembersIsolated", pods=len(apart), problem=some(why)))
    if census.split:
        first = census.split[0]
        given = f"Store TP {first.store_tp} in {first.cache_namespace or 'no namespace'}"
        expected = f"{census.resolution.store_tp} in {census.resolution.cache_namespace}"
        facts = {"pods": len(census.split), "given": given, "expected": expected}
        return from_refusal(kind, refusal("CacheSplit", **facts, command=census.commands(census.split)))
    unseen = [m for m in census.left_out if m.record is None]
    if unseen:
        facts = {"pods": len(unseen), "owners": some(sorted({m.owner.text for m in unseen}))}
        return from_refusal(kind, refusal("NotInjected", **facts, command=census.commands(unseen)))
    if census.left_out:
        record = census.left_out[0].record
        owners = some(sorted({m.owner.text for m in census.left_out}))
        reason = record.reason if record else "NotInjected"
        return Finding(kind, "False", reason, f"{len(census.left_out)} pod(s) were not injected: {owners}")
    if census.incomplete:
        problem = some([text for _, _, text in census.incomplete])
        return from_refusal(kind, refusal("GroupIncomplete", groups=len(census.incomplete), problem=problem))
    return _all_well(kind, census)


def _all_well(kind: str, census: Census) -> Finding:
    status: ConditionStatus = "True"
    if not census.injected:
        return Finding(kind, status, "NoMembers", "no pod has opted in")
    waiting = sum(1 for m in census.injected if m.report is None)
    if waiting == len(census.injected):
        return Finding(kind, status, "Unreported", f"{waiting} member(s) injected, none has reported yet")
    parts = [f"{len(census.injected) - waiting} member(s) share"]
    if waiting:
        parts.append(f"{waiting} have not reported yet")
    if census.outdated:
        parts.append(f"{len(census.outdated)} run an older revision with the same cache")
    return Finding(kind, status, "Consistent", ", ".join(parts))
