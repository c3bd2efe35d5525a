"""What is true of each member of a pool, and of all together: counts, groups of equal bytes, who must be restarted.

Why this exists: the pool's status and `kvshare check` must judge members alike, so both ask here. Members and the
pool's resolution in, plain values out; no clock, no cluster, no texts of conditions.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from kvshare_layout import heads
from kvshare_layout.errors import LayoutError
from kvshare_operator.api.status import Fingerprint, Members, Problem
from kvshare_operator.core.pool.groups import incomplete_groups
from kvshare_operator.core.pool.members import Member, Owner
from kvshare_operator.core.pool.resolve import Resolution

_MAX_FINGERPRINTS, _MAX_PROBLEMS, _MAX_FIELDS = 8, 20, 16

State = Literal[
    "shared", "worker", "unreported", "outdated", "recordDiffers", "fingerprintSplit", "isolated", "disabled",
    "cacheSplit", "notInjected",
]  # fmt: skip
RESTART: Final = frozenset({"notInjected", "outdated", "cacheSplit", "isolated", "disabled", "fingerprintSplit"})
"""States that end with a restart, after their cause is mended."""


@dataclasses.dataclass(frozen=True)
class MemberFinding:
    """One thing that is true of one member; ``reason`` is a code of the table, or `Shared` and the like."""

    state: State
    reason: str
    message: str = ""


class Census:
    """Members sorted by what is true of them.

    Attributes:
        workers: pods of groups that carry no flags.
        injected: members with flags.
        left_out: pods that opted in and were not injected.
        split: members of another namespace or Store TP.
        outdated: members of an older revision with the same cache.
        groups: sharing members by fingerprint, the largest group first.
        incomplete: groups of pods that opted in only in part: (owner, pods, sentence).
    """

    def __init__(self, namespace: str, resolution: Resolution, code: str, members: Sequence[Member]) -> None:
        self.namespace, self.resolution, self.code = namespace, resolution, code
        self.members = tuple(sorted(members, key=lambda member: (member.owner.text, member.name)))
        self.workers = [m for m in self.members if m.is_worker]
        self.injected = [m for m in self.members if m.injected and not m.is_worker]
        self.left_out = [m for m in self.members if not m.injected]
        self.split = [m for m in self.injected if self._splits(m)]
        self._split_ids = {m.uid for m in self.split}
        same_cache = [m for m in self.injected if m.uid not in self._split_ids]
        self.outdated = [m for m in same_cache if m.record is not None and m.record.revision != code]
        self._outdated_ids = {m.uid for m in self.outdated}
        self.groups = self._groups()
        self._most = self.groups[0][0] if self.groups else ""
        present = [m.group for m in self.members if m.group is not None]
        self.incomplete = [(Owner(g.kind, g.name), pods, text) for g, pods, text in incomplete_groups(present)]

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
        found: dict[str, list[Member]] = collections.defaultdict(list)
        for member in self.injected:
            if member.report is not None and member.report.verdict == "shared" and member.uid not in self._split_ids:
                found[member.report.fingerprint].append(member)
        return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))

    def findings_of(self, member: Member) -> list[MemberFinding]:
        """Return everything that is true of a member, the worst first; never empty."""
        record, report = member.record, member.report
        if record is None:
            return [MemberFinding("notInjected", "NotInjected", "no record of the webhook on this pod")]
        if record.reason:
            return [MemberFinding("notInjected", record.reason, record.message)]
        if member.is_worker:
            return [MemberFinding("worker", "Worker")]
        found: list[MemberFinding] = []
        if member.uid in self._split_ids:
            found.append(MemberFinding("cacheSplit", "CacheSplit", self._split_text(member)))
        if report is not None and report.verdict != "shared":
            state: State = "disabled" if report.verdict == "disabled" else "isolated"
            reason = report.reason or report.verdict.capitalize()
            found.append(MemberFinding(state, reason, f"{report.verdict}: {report.message}"))
        elif report is not None and member.uid not in self._split_ids and report.fingerprint != self._most:
            text = f"fingerprint {report.fingerprint[:16]} is not the pool's most common one"
            found.append(MemberFinding("fingerprintSplit", "FingerprintSplit", text))
        if member.uid in self._outdated_ids:
            text = f"injected for revision {record.revision or 'none'}, the pool is at {self.code}; same cache"
            found.append(MemberFinding("outdated", "Outdated", text))
        if member.record_differs:
            text = "the record annotation was changed by hand; the pod's flags count"
            found.append(MemberFinding("recordDiffers", "RecordDiffers", text))
        return found or [usual(member)]

    def _split_text(self, member: Member) -> str:
        return (
            f"uses Store TP {member.store_tp} in {member.cache_namespace or 'no namespace'}, the pool uses "
            f"{self.resolution.store_tp} in {self.resolution.cache_namespace}"
        )

    def counts(self) -> Members:
        """Return the counts of the status."""
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
        """Return the groups of equal bytes, each with the fields in which it differs from the largest one."""
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
        """Return all fields in which members with shared caches differ, sorted."""
        return sorted({field for one in self.fingerprints() for field in one.differing_fields or []})

    def problems(self) -> list[Problem]:
        """Return what does not share, by owner and cause, each with the command that restarts the owner."""
        found: dict[tuple[str, str, str], int] = collections.Counter()
        for member in self.members:
            for finding in self.findings_of(member):
                if finding.state not in ("shared", "worker", "unreported"):
                    command = member.owner.restart_command(self.namespace)
                    found[member.owner.text, finding.reason, _with_command(finding, command)] += 1
        for owner, pods, text in self.incomplete:
            text = _short(text, f" Restart: {owner.restart_command(self.namespace)}")
            found[owner.text, "GroupIncomplete", text] += pods
        rows = [
            Problem(owner=owner[:320], pods=pods, reason=reason[:64], message=message)
            for (owner, reason, message), pods in sorted(found.items())
        ]
        return rows[:_MAX_PROBLEMS]

    def commands(self, members: Iterable[Member]) -> str:
        """Return the commands that restart the owners of ``members``."""
        return some(sorted({m.owner.restart_command(self.namespace) for m in members}))


def usual(member: Member) -> MemberFinding:
    """Return what is said of an injected member about which nothing is wrong."""
    return MemberFinding("unreported", "Unreported") if member.report is None else MemberFinding("shared", "Shared")


def _with_command(finding: MemberFinding, command: str) -> str:
    if finding.state not in RESTART:
        return finding.message[:512]
    at_once = finding.state in ("outdated", "cacheSplit") or finding.reason == "NotInjected"
    return _short(finding.message.rstrip(), f" {'Restart' if at_once else 'Mend that, then'}: {command}")


def _short(text: str, ending: str) -> str:
    stop = "" if text.endswith(".") else "."
    return f"{text[: 512 - len(ending) - 1]}{stop}{ending}"[:512]


def some(texts: Sequence[str], limit: int = 3) -> str:
    """Return a few of ``texts`` in one line, and how many more there are."""
    more = len(texts) - limit
    return "; ".join(texts[:limit]) + (f"; and {more} more" if more > 0 else "")


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(key[:64] for key in one.keys() | other.keys() if one.get(key) != other.get(key))
