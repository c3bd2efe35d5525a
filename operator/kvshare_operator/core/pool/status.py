"""The status of a pool from everything that was gathered about it.

Why this exists: one pure function from a frozen input to the whole status, so that every sentence of
`kubectl describe kvsharepool` has a test without a cluster. Reads no clock: the time is part of the input.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvshare_layout import heads
from kvshare_layout.errors import LayoutError
from kvshare_operator.api import names
from kvshare_operator.api.pool import Fingerprint, Members, Problem, Spec, SpecError, Status, read_spec, read_status
from kvshare_operator.api.reasons import refusal
from kvshare_operator.core.pool.conditions import ConditionStatus, Finding, from_refusal, to_conditions
from kvshare_operator.core.pool.members import Member
from kvshare_operator.core.pool.resolve import Resolution, resolve
from kvshare_operator.core.pool.revision import revision
from kvshare_operator.core.pool.view import connector_image
from kvshare_operator.core.server_version import Version, image_volume_problem
from kvshare_operator.core.store.health import StoreState, managed_finding

_MAX_FINGERPRINTS, _MAX_PROBLEMS, _MAX_FIELDS = 8, 20, 16


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


def next_status(gathered: Gathered) -> Status:
    """Return the status that the pool should have."""
    before = read_status(gathered.pool.get("status"))
    metadata = gathered.pool.get("metadata") or {}
    namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
    generation = int(metadata.get("generation") or 0)
    try:
        spec = read_spec(gathered.pool.get("spec"))
    except SpecError as error:
        return _invalid(before, error, generation, gathered.now)
    kv_heads = spec.model.kv_heads or _reported_heads(gathered.members) or before.kv_heads
    resolution = resolve(namespace, name, spec, before.model_copy(update={"kv_heads": kv_heads}))
    image = connector_image(spec, before, generation, gathered.default_image)
    code = revision(spec, resolution, image)
    census = _Census(namespace, resolution, code, gathered.members)
    findings = _findings(spec, resolution, gathered, census)
    return Status(
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


def _findings(spec: Spec, resolution: Resolution, gathered: Gathered, census: _Census) -> list[Finding]:
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
    consistent = census.consistent()
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
        message = f"{resolution.master_address} accepts connections from the operator"
        return Finding(names.STORE_REACHABLE, "True", "Reachable", message)
    refused = refusal("StoreUnreachable", address=resolution.master_address, problem=reach.problem)
    return from_refusal(names.STORE_REACHABLE, refused)


class _Census:
    """Members sorted by what is true of them."""

    def __init__(self, namespace: str, resolution: Resolution, code: str, members: Sequence[Member]) -> None:
        self.namespace, self.resolution, self.code = namespace, resolution, code
        ordered = sorted(members, key=lambda member: (member.owner.text, member.name))
        self.workers = [m for m in ordered if m.is_worker]
        self.injected = [m for m in ordered if m.injected and not m.is_worker]
        self.left_out = [m for m in ordered if not m.injected]
        self.split = [m for m in self.injected if self._splits(m)]
        self._split_ids = {m.uid for m in self.split}
        same_cache = [m for m in self.injected if m.uid not in self._split_ids]
        self.outdated = [m for m in same_cache if m.record is not None and m.record.revision != code]
        self._outdated_ids = {m.uid for m in self.outdated}
        self.groups = self._groups()

    def _normal(self, store_tp: int | None) -> int | None:
        heads_known = self.resolution.kv_heads
        if store_tp is None or heads_known is None:
            return store_tp
        try:
            return heads.normalise_store_tp(store_tp, heads_known)
        except LayoutError:
            return store_tp

    def _splits(self, member: Member) -> bool:
        if member.store_tp is None and not member.cache_namespace:
            return False
        return (self._normal(member.store_tp), member.cache_namespace) != (
            self._normal(self.resolution.store_tp),
            self.resolution.cache_namespace,
        )

    def _groups(self) -> list[tuple[str, list[Member]]]:
        """Sharing members of the present namespace by fingerprint, the largest group first."""
        found: dict[str, list[Member]] = collections.defaultdict(list)
        for member in self.injected:
            if member.report is not None and member.report.verdict == "shared" and member.uid not in self._split_ids:
                found[member.report.fingerprint].append(member)
        return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))

    def counts(self) -> Members:
        verdicts = collections.Counter(m.report.verdict if m.report else "unreported" for m in self.injected)
        return Members(
            total=len(self.injected) + len(self.left_out),
            shared=verdicts["shared"],
            isolated=verdicts["isolated"],
            disabled=verdicts["disabled"],
            unreported=verdicts["unreported"],
            outdated=len(self.outdated) + len(self.split),
            not_injected=len(self.left_out),
        )

    def fingerprints(self) -> list[Fingerprint]:
        out = []
        largest = self.groups[0][1][0].report if self.groups else None
        for identity, members in self.groups[:_MAX_FINGERPRINTS]:
            seen = [m.report for m in members if m.report is not None]
            layouts = sorted({layout for report in seen for layout in report.rank_layouts})
            fields = _differing(largest.manifest if largest else {}, seen[0].manifest)
            out.append(
                Fingerprint(
                    id=identity[:16] or "none",
                    members=len(members),
                    tensor_parallel_sizes=sorted({report.tp for report in seen})[:16],
                    layouts=[layout for layout in layouts if layout][:8],
                    differing_fields=fields[:_MAX_FIELDS] or None,
                )
            )
        return out

    def split_fields(self) -> list[str]:
        return sorted({field for one in self.fingerprints() for field in one.differing_fields or []})

    def problems(self) -> list[Problem]:
        found: dict[tuple[str, str, str], int] = collections.Counter()
        for member, reason, message in self._single_problems():
            found[member.owner.text, reason, message[:512]] += 1
        rows = [
            Problem(owner=owner[:320], pods=pods, reason=reason[:64], message=message)
            for (owner, reason, message), pods in sorted(found.items())
        ]
        return rows[:_MAX_PROBLEMS]

    def _single_problems(self) -> Iterable[tuple[Member, str, str]]:
        for member in self.left_out:
            command = member.owner.restart_command(self.namespace)
            if member.record is not None:
                yield member, member.record.reason, member.record.message
            else:
                refused = refusal("NotInjected", pods=1, command=command)
                yield member, refused.code, f"no record of the webhook on this pod. {refused.remedy}"
        for member in self.injected:
            command = member.owner.restart_command(self.namespace)
            if member.uid in self._split_ids:
                yield member, "CacheSplit", f"{self._split_text(member)}. Restart: {command}"
            elif member.uid in self._outdated_ids and member.record is not None:
                given = member.record.revision or "none"
                text = f"injected for revision {given}, the pool is at {self.code}; same cache. Restart: {command}"
                yield member, "Outdated", text
            if member.record_differs:
                yield member, "RecordDiffers", "the record annotation was changed by hand; the pod's flags count"
            report = member.report
            if report is not None and report.verdict != "shared":
                yield member, report.reason or report.verdict.capitalize(), f"{report.verdict}: {report.message}"
        if len(self.groups) > 1:
            for identity, members in self.groups[1:]:
                for member in members:
                    yield member, "FingerprintSplit", f"fingerprint {identity[:16]} is not the pool's most common one"

    def _split_text(self, member: Member) -> str:
        return (
            f"uses Store TP {member.store_tp} in {member.cache_namespace or 'no namespace'}, the pool uses "
            f"{self.resolution.store_tp} in {self.resolution.cache_namespace}"
        )

    def consistent(self) -> Finding:
        """One finding about all members: the worst thing first."""
        kind = names.MEMBERS_CONSISTENT
        if len(self.groups) > 1:
            fields = ", ".join(self.split_fields()) or "fields that were not reported"
            refused = refusal("FingerprintSplit", count=len(self.groups), fields=fields)
            return from_refusal(kind, refused)
        apart = [m for m in self.injected if m.report is not None and m.report.verdict != "shared"]
        if apart:
            why = sorted({f"{m.owner.text} ({m.report.reason})" for m in apart if m.report})
            return from_refusal(kind, refusal("MembersIsolated", pods=len(apart), problem=_some(why)))
        if self.split:
            first = self.split[0]
            given = f"Store TP {first.store_tp} in {first.cache_namespace or 'no namespace'}"
            expected = f"{self.resolution.store_tp} in {self.resolution.cache_namespace}"
            facts = {"pods": len(self.split), "given": given, "expected": expected}
            return from_refusal(kind, refusal("CacheSplit", **facts, command=self._commands(self.split)))
        unseen = [m for m in self.left_out if m.record is None]
        if unseen:
            command = self._commands(unseen)
            return from_refusal(kind, refusal("NotInjected", pods=len(unseen), command=command))
        if self.left_out:
            record = self.left_out[0].record
            owners = _some(sorted({m.owner.text for m in self.left_out}))
            reason = record.reason if record else "NotInjected"
            return Finding(kind, "False", reason, f"{len(self.left_out)} pod(s) were not injected: {owners}")
        return self._all_well(kind)

    def _all_well(self, kind: str) -> Finding:
        status: ConditionStatus = "True"
        if not self.injected:
            return Finding(kind, status, "NoMembers", "no pod has opted in")
        waiting = sum(1 for m in self.injected if m.report is None)
        if waiting == len(self.injected):
            return Finding(kind, status, "Unreported", f"{waiting} member(s) injected, none has reported yet")
        parts = [f"{len(self.injected) - waiting} member(s) share"]
        if waiting:
            parts.append(f"{waiting} have not reported yet")
        if self.outdated:
            parts.append(f"{len(self.outdated)} run an older revision with the same cache")
        return Finding(kind, status, "Consistent", ", ".join(parts))

    def _commands(self, members: Iterable[Member]) -> str:
        return _some(sorted({m.owner.restart_command(self.namespace) for m in members}))


def _some(texts: Sequence[str], limit: int = 3) -> str:
    more = len(texts) - limit
    return "; ".join(texts[:limit]) + (f"; and {more} more" if more > 0 else "")


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(key[:64] for key in one.keys() | other.keys() if one.get(key) != other.get(key))
