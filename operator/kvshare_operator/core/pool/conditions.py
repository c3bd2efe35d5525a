"""Conditions: how a finding becomes a condition, on pods and on pools.

Why this exists: `lastTransitionTime` moves only with `status`, and a condition that did not change must
compare equal, so that a steady state writes nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any, Literal

from kvshare_layout import reports
from kvshare_operator.api import names
from kvshare_operator.api.pool import Condition
from kvshare_operator.api.reasons import Refusal

ConditionStatus = Literal["True", "False", "Unknown"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found for one condition."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


def from_refusal(kind: str, refused: Refusal, status: ConditionStatus = "False") -> Finding:
    """Return a finding with a reason of the table."""
    return Finding(kind, status, refused.code, f"{refused.message} {refused.remedy}")


def timestamp(now: datetime.datetime) -> str:
    """Return a time as Kubernetes writes it."""
    return now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_conditions(
    findings: Iterable[Finding], before: Iterable[Condition], generation: int, now: datetime.datetime
) -> list[Condition]:
    """Turn findings into conditions; the transition time of an unchanged status is kept."""
    known = {condition.type: condition for condition in before}
    out = []
    for finding in findings:
        old = known.get(finding.type)
        kept = old is not None and old.status == finding.status
        out.append(
            Condition(
                type=finding.type,
                status=finding.status,
                reason=finding.reason[:128],
                message=finding.message[:4096],
                last_transition_time=old.last_transition_time if kept and old is not None else timestamp(now),
                observed_generation=generation,
            )
        )
    return out


def pod_conditions(report: reports.MemberReport, now: datetime.datetime) -> list[dict[str, Any]]:
    """Return the two conditions that a report becomes: the verdict for people, the report for the controller."""
    shared = report.verdict == "shared"
    facts = [f"verdict {report.verdict}", f"Store TP {report.store_tp}", f"TP {report.tp}"]
    if report.rank_layouts:
        facts.append(f"layout {', '.join(report.rank_layouts)}")
    if report.fingerprint:
        facts.append(f"fingerprint {report.fingerprint[:16]}")
    message = f"{report.message} ({'; '.join(facts)})" if report.message else "; ".join(facts)
    when = timestamp(now)
    return [
        {
            "type": names.SHARED,
            "status": "True" if shared else "False",
            "reason": report.reason or report.verdict.capitalize(),
            "message": message,
            "lastTransitionTime": when,
        },
        {
            "type": names.REPORT,
            "status": "True",
            "reason": "Reported",
            "message": reports.to_json(report).decode(),
            "lastTransitionTime": when,
        },
    ]
