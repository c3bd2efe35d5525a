"""From what was read of a cluster to findings about webhook, pools and owners. Pure; reads no clock.

Why this exists: one function says what is good and what is not, so that exit code, table and JSON agree.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.status import Condition, read_status
from kvshare_operator.cli.check_reading import Probe, Seen
from kvshare_operator.core.pool import census, status
from kvshare_operator.core.pool.members import Member

Json = dict[str, Any]
CERTIFICATE_WARNING: Final = datetime.timedelta(days=7)
"""Certificates are renewed 30 days before their end: one this close was not."""
GOOD: Final = frozenset({"shared", "worker", "outdated", "unreported"})
"""States that need nobody's attention now; `unreported` ends by itself."""


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
    """One pool.

    Attributes:
        store: what the operator last said about the store, with its reason where it is not well.
        versions: payload image and members' versions of vLLM -> how many members.
    """

    name: str
    ready: str
    reason: str
    message: str
    members: Mapping[str, int]
    fingerprints: tuple[Json, ...]
    owners: tuple[OwnerRow, ...]
    store: str = ""
    versions: str = ""

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
        versions: what runs -> its version.
    """

    dry_run_injected: bool | None
    certificate_expires: datetime.datetime | None
    pools: tuple[PoolRow, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
        versions=seen.versions,
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
    judged = status.judge(status.Gathered(pool, own, status.Reach(None), stored.connector_image or "", now))
    fresh = stored.observed_generation == metadata.get("generation")
    conditions = {one.type: one for one in stored.conditions or []}
    ready = conditions.get(names.READY)
    found = judged.status
    return PoolRow(
        name=f"{namespace}/{name}" if qualified else name,
        ready=ready.status if ready and fresh else "Unknown",
        reason=ready.reason if ready and fresh else "StatusStale",
        message=ready.message if ready and fresh else "the controller has not looked at the present spec yet",
        members=found.members.model_dump(by_alias=True) if found.members else {},
        fingerprints=tuple(one.model_dump(by_alias=True, exclude_none=True) for one in found.fingerprints or []),
        owners=_owners(judged.census, namespace) if judged.census is not None else (),
        store=_store(conditions.get(names.STORE_REACHABLE)),
        versions=_versions(stored.connector_image, own),
    )


def _store(condition: Condition | None) -> str:
    if condition is None:
        return "nothing is known yet"
    return condition.message if condition.status == "True" else f"{condition.reason}: {condition.message}"


def _versions(image: str | None, members: tuple[Member, ...]) -> str:
    engines = collections.Counter(
        member.report.engine for member in members if member.report is not None and member.report.engine
    )
    told = [f"vLLM {version} ({count} member(s))" for version, count in sorted(engines.items())]
    return ", ".join([*([f"connector {image}"] if image else []), *told])


def _owners(judged: census.Census, namespace: str) -> tuple[OwnerRow, ...]:
    """One row for each owner and the worst that is true of its pods; an edited record changes nothing."""
    found: collections.Counter[tuple[str, str, str, str, str]] = collections.Counter()
    for member in judged.members:
        worst = judged.findings_of(member)[0]
        if worst.state == "recordDiffers":
            worst = census.usual(member)
        command = member.owner.restart_command(namespace) if worst.state in census.RESTART else ""
        found[member.owner.text, worst.state, worst.reason, command, worst.message] += 1
    for owner, pods, text in judged.incomplete:
        found[owner.text, "groupIncomplete", "GroupIncomplete", owner.restart_command(namespace), text] += pods
    return tuple(
        OwnerRow(owner, pods, state, reason, command or None, message)
        for (owner, state, reason, command, message), pods in sorted(found.items())
    )
