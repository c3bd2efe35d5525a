"""From what was read of a cluster to findings about webhook, pools and owners. Pure; reads no clock.

Why this exists: one function says what is good and what is not, so that exit code, table and JSON agree.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any, Final

from kvshare_layout import heads
from kvshare_layout.errors import LayoutError
from kvshare_operator.api import names
from kvshare_operator.api.pool import Status, read_status
from kvshare_operator.cli.check_reading import Probe, Seen
from kvshare_operator.core.pool.members import Member
from kvshare_operator.core.pool.status import Gathered, Reach, next_status

Json = dict[str, Any]
CERTIFICATE_WARNING: Final = datetime.timedelta(days=7)
"""Certificates are renewed 30 days before their end: one this close was not."""
GOOD: Final = frozenset({"shared", "worker", "outdated", "unreported"})
"""States that need nobody's attention now; `unreported` ends by itself."""
_RESTART: Final = frozenset({"notInjected", "outdated", "cacheSplit", "isolated", "disabled", "fingerprintSplit"})


@dataclasses.dataclass(frozen=True)
class OwnerRow:
    """Pods of one owner in one state."""

    name: str
    pods: int
    state: str
    reason: str
    restart_command: str | None
    message: str = ""


@dataclasses.dataclass(frozen=True)
class PoolRow:
    """One pool."""

    name: str
    ready: str
    reason: str
    message: str
    members: Mapping[str, int]
    fingerprints: tuple[Json, ...]
    owners: tuple[OwnerRow, ...]

    @property
    def good(self) -> bool:
        """Whether pool and members are as they should be."""
        return self.ready == "True" and all(owner.state in GOOD for owner in self.owners)


@dataclasses.dataclass(frozen=True)
class Findings:
    """Everything that is printed.

    Attributes:
        dry_run_injected: None when no dry run was possible.
        problems: sentences about what is wrong besides owners.
    """

    dry_run_injected: bool | None
    certificate_expires: datetime.datetime | None
    pools: tuple[PoolRow, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether nothing needs attention."""
        return not self.problems and all(pool.good for pool in self.pools)

    @property
    def settled(self) -> bool:
        """Whether waiting would change nothing: good, and every member has reported."""
        return self.good and not any(owner.state == "unreported" for pool in self.pools for owner in pool.owners)

    def to_json(self) -> Json:
        """Return the documented JSON."""
        expires = self.certificate_expires
        return {
            "webhook": {
                "dryRunInjected": self.dry_run_injected,
                "certExpires": expires.strftime("%Y-%m-%dT%H:%M:%SZ") if expires else None,
            },
            "pools": [
                {
                    "name": pool.name,
                    "members": dict(pool.members),
                    "fingerprints": list(pool.fingerprints),
                    "owners": [
                        {
                            "name": owner.name,
                            "pods": owner.pods,
                            "state": owner.state,
                            "reason": owner.reason,
                            "restartCommand": owner.restart_command,
                        }
                        for owner in pool.owners
                    ],
                }
                for pool in self.pools
            ],
        }


def judge(seen: Seen, expires: datetime.datetime | None, now: datetime.datetime, *, qualified: bool) -> Findings:
    """Judge everything. ``qualified`` names pools with their namespace."""
    problems = [text for probe in seen.probes if (text := _probe_problem(probe))]
    if expires is not None and expires - now < CERTIFICATE_WARNING:
        problems.append(f"the webhook's certificate ends at {expires:%Y-%m-%d %H:%M} UTC and was not renewed")
    return Findings(
        dry_run_injected=all(_injected(probe) for probe in seen.probes) if seen.probes else None,
        certificate_expires=expires,
        pools=tuple(_pool(pool, seen.members, now, qualified) for pool in seen.pools),
        problems=tuple(problems),
        notes=seen.notes,
    )


def _injected(probe: Probe) -> bool:
    return probe.record is not None and not probe.record.reason


def _probe_problem(probe: Probe) -> str | None:
    where = "/".join(probe.pool)
    if probe.record is None:
        return f"pool {where}: a dry-run pod was not touched: the webhook does not answer, or leaves this namespace out"
    if probe.record.reason:
        return f"pool {where}: a dry-run pod was not injected: {probe.record.reason}: {probe.record.message}"
    return None


def _pool(pool: Json, members: tuple[Member, ...], now: datetime.datetime, qualified: bool) -> PoolRow:
    metadata = pool.get("metadata") or {}
    namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
    own = tuple(member for member in members if (member.namespace, member.pool) == (namespace, name))
    stored = read_status(pool.get("status"))
    image = stored.connector_image or ""
    status = next_status(Gathered(pool, own, Reach(None), image, now))
    fresh = stored.observed_generation == metadata.get("generation")
    ready = next((one for one in stored.conditions or [] if one.type == names.READY), None)
    counted = status.members.model_dump(by_alias=True) if status.members else {}
    return PoolRow(
        name=f"{namespace}/{name}" if qualified else name,
        ready=ready.status if ready and fresh else "Unknown",
        reason=ready.reason if ready and fresh else "StatusStale",
        message=ready.message if ready and fresh else "the controller has not looked at the present spec yet",
        members=counted,
        fingerprints=tuple(one.model_dump(by_alias=True, exclude_none=True) for one in status.fingerprints or []),
        owners=_owners(own, namespace, status, stored.revision if fresh else None),
    )


def _owners(members: tuple[Member, ...], namespace: str, status: Status, revision: str | None) -> tuple[OwnerRow, ...]:
    most = status.fingerprints[0].id if status.fingerprints else None
    found: collections.Counter[tuple[str, str, str, str, str]] = collections.Counter()
    for member in members:
        state, reason, message = _state(member, status, revision, most)
        command = member.owner.restart_command(namespace) if state in _RESTART else ""
        found[member.owner.text, state, reason, command, message] += 1
    return tuple(
        OwnerRow(owner, pods, state, reason, command or None, message)
        for (owner, state, reason, command, message), pods in sorted(found.items())
    )


def _state(member: Member, status: Status, revision: str | None, most: str | None) -> tuple[str, str, str]:
    """Return (state, reason, message) of one member: the worst thing first."""
    record, report = member.record, member.report
    if record is None:
        return "notInjected", "NotInjected", "no webhook looked at this pod"
    if record.reason:
        return "notInjected", record.reason, record.message
    if member.is_worker:
        return "worker", "Worker", ""
    if _splits(member, status):
        given = f"Store TP {member.store_tp} in {member.cache_namespace or 'no namespace'}"
        return "cacheSplit", "CacheSplit", f"uses {given}; the pool has moved on"
    if report is not None and report.verdict != "shared":
        return report.verdict, report.reason or report.verdict.capitalize(), report.message
    if report is not None and most is not None and not report.fingerprint.startswith(most):
        return "fingerprintSplit", "FingerprintSplit", "its bytes differ from those of most members"
    if revision is not None and record.revision != revision:
        return "outdated", "Outdated", "runs an older revision of the pool, with the same cache"
    if report is None:
        return "unreported", "Unreported", ""
    return "shared", "Shared", ""


def _splits(member: Member, status: Status) -> bool:
    if member.store_tp is None and not member.cache_namespace:
        return False

    def normal(size: int | None) -> int | None:
        try:
            return heads.normalise_store_tp(size, status.kv_heads) if size and status.kv_heads else size
        except LayoutError:
            return size

    mine = (normal(member.store_tp), member.cache_namespace)
    return mine != (normal(status.store_tp_size), status.cache_namespace)
