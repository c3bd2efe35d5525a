"""The chart's permissions, compared with the requests that an API server recorded: none missing, none unused."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pods import Json
from testbed.audit import Request

APPLIED = "server-side apply of an object that does not exist yet is authorised as `create`, and recorded as `patch`"
NEVER_RECORDED: dict[tuple[str, str, str], str] = {
    ("kvshare-controller", "deployments", "create"): APPLIED,
    ("kvshare-controller", "statefulsets", "create"): APPLIED,
    ("kvshare-controller", "services", "create"): APPLIED,
    ("kvshare-controller", "poddisruptionbudgets", "create"): APPLIED,
    ("kvshare-controller", "networkpolicies", "create"): APPLIED,
    ("kvshare-controller", "secrets", "create"): APPLIED,
}
"""(account, resource, verb) of a permission that is needed and yet appears in no audit log -> why."""


@dataclass(frozen=True)
class Grant:
    """One verb on one resource for one account; ``names`` is empty when it is for all."""

    account: str
    verb: str
    group: str
    resource: str
    namespace: str
    names: tuple[str, ...]

    def covers(self, request: Request) -> bool:
        """Whether this is the permission for a request."""
        return (
            (self.account, self.verb, self.group, self.resource)
            == (request.account, request.verb, request.group, request.resource)
            and self.namespace in ("", request.namespace)
            and (not self.names or request.name in self.names)
        )


def grants(objects: list[Json]) -> Iterator[Grant]:
    """Everything that the roles among rendered objects grant; role and account have the same name in this chart."""
    for role in objects:
        if role["kind"] not in ("Role", "ClusterRole"):
            continue
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        yield Grant(
                            account=role["metadata"]["name"],
                            verb=verb,
                            group=group,
                            resource=resource,
                            namespace=role["metadata"].get("namespace", ""),
                            names=tuple(rule.get("resourceNames", ())),
                        )


def problems(objects: list[Json], recorded: Collection[Request]) -> list[str]:
    """Return a sentence for every permission that was missing, and for every one that nobody used."""
    granted = list(grants(objects))
    accounts = {grant.account for grant in granted}
    used = {request for request in recorded if request.account in accounts and request.resource}
    said = {
        f"{one.account} was refused {one.verb} on {one.resource} {one.name} in {one.namespace or 'the whole cluster'}"
        for one in used
        if one.code == 403
    }
    said |= {
        f"{one.account} used {one.verb} on {one.resource} {one.name}, which the chart does not grant"
        for one in used
        if one.code != 403 and not any(grant.covers(one) for grant in granted)
    }
    said |= {
        f"{grant.account} may {grant.verb} {grant.resource} of {grant.group or 'the core'}, and nothing used it"
        for grant in granted
        if (grant.account, grant.resource, grant.verb) not in NEVER_RECORDED
        and not any(grant.covers(one) for one in used)
    }
    said |= {
        f"{account} {verb} {resource} is explained as never recorded, but it was"
        for account, resource, verb in NEVER_RECORDED
        if any((one.account, one.resource, one.verb) == (account, resource, verb) for one in used)
    }
    return sorted(said)
