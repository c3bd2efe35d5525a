"""Conditions: how a finding becomes a condition, on pods and on pools.

Why this exists: `lastTransitionTime` moves only with `status`, and a condition that did not change must
compare equal, so that a steady state writes nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from kvshare_layout import reports
from kvshare_layout.errors import LayoutError
from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal
from kvshare_operator.api.status import Condition

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


def report_condition(report: reports.MemberReport, now: datetime.datetime) -> dict[str, Any]:
    """Return the condition that keeps an engine's report for the controller; each engine of a pod has its own."""
    kind = names.REPORT if report.engine_index == 0 else f"{names.REPORT}-{report.engine_index}"
    return {
        "type": kind,
        "status": "True",
        "reason": "Reported",
        "message": reports.to_json(report).decode(),
        "lastTransitionTime": timestamp(now),
    }


def shared_condition(found: Collection[reports.MemberReport], now: datetime.datetime) -> dict[str, Any] | None:
    """Return the condition for people: the worst verdict of all engines of the pod; None without a report."""
    report = reports.worst(found)
    if report is None:
        return None
    facts = [f"verdict {report.verdict}", f"Store TP {report.store_tp}", f"TP {report.tp}"]
    if report.rank_layouts:
        facts.append(f"layout {', '.join(report.rank_layouts)}")
    if report.fingerprint:
        facts.append(f"fingerprint {report.fingerprint[:16]}")
    if len(found) > 1:
        sharing = sum(one.verdict == "shared" for one in found)
        facts.append(f"engine {report.engine_index}; {sharing} of {len(found)} engines that have reported share")
    return {
        "type": names.SHARED,
        "status": "True" if report.verdict == "shared" else "False",
        "reason": report.reason or report.verdict.capitalize(),
        "message": f"{report.message} ({'; '.join(facts)})" if report.message else "; ".join(facts),
        "lastTransitionTime": timestamp(now),
    }


def pod_conditions(report: reports.MemberReport, now: datetime.datetime) -> list[dict[str, Any]]:
    """Return the two conditions of a pod with one engine: the verdict for people, the report for the controller."""
    shared = shared_condition([report], now)
    return [*([shared] if shared else []), report_condition(report, now)]


def reports_of(status: Mapping[str, Any]) -> list[reports.MemberReport]:
    """Return the reports of all engines in a pod's status; what cannot be read is left out."""
    found: dict[int, reports.MemberReport] = {}
    for condition in status.get("conditions") or []:
        kind = str(condition.get("type", ""))
        if kind == names.REPORT or kind.startswith(f"{names.REPORT}-"):
            try:
                report = reports.from_json(str(condition.get("message", "")).encode())
            except LayoutError:
                continue
            found[report.engine_index] = report
    return [found[index] for index in sorted(found)]
