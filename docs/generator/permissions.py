"""reference/permissions.md, from the chart's RBAC template and the comments above its rules."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from generator.source import ROOT, cell

TEMPLATE = ROOT / "charts" / "kvshare" / "templates" / "operator" / "rbac.yaml"
SCOPES = {
    "namespaces": "in the whole cluster, or only in each of `watchNamespaces`",
    "cluster": "in the whole cluster",
    "own": "in its own namespace",
}
HEAD = """# Permissions of the operator

What the chart grants, and why; `charts/kvshare/templates/operator/rbac.yaml` is the source. Nothing is deleted, no pod
is changed besides its status, and one Secret is read, by name. Whoever may create Deployments can run pods: without
managed stores set `managedStore.enabled: false`, which takes these permissions away. With `watchNamespaces` most
permissions are granted by Roles in these namespaces ([how](../howto/namespaces.md)); with certificates of
[cert-manager or your own](../howto/certificates.md) nobody needs a Secret or the webhook configuration.

The pod of `helm test` has a service account of its own, which may create pods in `helmTest.namespace` and exists only
while the test runs.
"""


@dataclass
class Rule:
    """One rule of a role, as the template says it."""

    role: str
    scope: str
    why: str
    condition: str = ""
    groups: str = ""
    resources: str = ""
    names: str = ""
    verbs: str = ""


def page() -> str:
    """Every rule of every role."""
    out, last = [HEAD], ""
    for rule in rules():
        title = f"{rule.role.capitalize()}, {rule.scope}"
        if title != last:
            out.append(f"\n## {title}\n\n| Resources | Group | Verbs | Only | What for |\n|---|---|---|---|---|\n")
            last = title
        only = "; ".join(filter(None, [rule.names and f"named {rule.names}", rule.condition]))
        resources = ", ".join(f"`{one}`" for one in rule.resources.split(", "))
        group = f"`{rule.groups}`" if rule.groups else "core"
        out.append(f"| {resources} | {group} | {rule.verbs} | {only} | {cell(rule.why)} |\n")
    return "".join(out)


def rules() -> Iterator[Rule]:
    """Read the template line by line. A rule without a comment of its own has the one above it."""
    role = scope = why = condition = ""
    rule: Rule | None = None
    fresh = True
    for line in TEMPLATE.read_text().splitlines():
        bare = line.strip()
        if match := re.match(r'\{\{- define "kvshare\.rules\.(\w+)\.(\w+)" ', bare):
            role, scope, condition = match[1], SCOPES[match[2]], ""
        elif match := re.fullmatch(r"\{\{- if (not |eq )?\.Values\.(\S+)(?: \"(\w+)\")? \}\}", bare):
            value = f"`{match[2]}: {match[3]}`" if match[3] else f"`{match[2]}`"
            condition = f"{'without' if match[1] == 'not ' else 'with'} {value}"
        elif bare == "{{- end }}":
            condition = ""
        elif bare.startswith("# ") and line.startswith("  #"):
            why, fresh = (bare[2:] if fresh else f"{why} {bare[2:]}"), False
        elif match := re.fullmatch(r"(?:- )?(apiGroups|resources|resourceNames|verbs): ?(?:\[(.*)\])?", bare):
            if match[1] == "apiGroups":
                rule, fresh = Rule(role, scope, why, condition, groups=match[2].strip('"')), True
            elif rule is not None:
                _complete(rule, match[1], match[2] or "")
                if match[1] == "verbs":
                    yield rule


def _complete(rule: Rule, field: str, value: str) -> None:
    if field == "resources":
        rule.resources = value
    elif field == "verbs":
        rule.verbs = value
    else:
        rule.names = {
            '{{ include "kvshare.fullname" . }}': "as the release",
            '{{ include "kvshare.certificateSecret" . | quote }}': "as the certificates' Secret",
        }.get(value, "as in the template")
