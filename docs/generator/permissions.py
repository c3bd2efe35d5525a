"""reference/permissions.md, from the chart's RBAC template and the comments above its rules."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from generator.source import ROOT, cell

TEMPLATE = ROOT / "charts" / "kvshare" / "templates" / "operator" / "rbac.yaml"
HEAD = """# Permissions of the operator

What the chart grants, and why; `charts/kvshare/templates/operator/rbac.yaml` is the source. Nothing is deleted, no pod
is changed besides its status, and one Secret is read, by name. Whoever may create Deployments can run pods: without
managed stores set `managedStore.enabled: false`, which takes these permissions away.
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
        if match := re.fullmatch(r"kind: (ClusterRole|Role)", bare):
            scope = {"ClusterRole": "in the whole cluster", "Role": "in its own namespace"}[match[1]]
        elif match := re.fullmatch(r"name: \{\{ \$name \}\}-(controller|webhook)", bare):
            role = match[1]
        elif match := re.fullmatch(r"\{\{- if \.Values\.(\S+) \}\}", bare):
            condition = f"with `{match[1]}`"
        elif bare == "{{- end }}":
            condition = ""
        elif bare.startswith("# ") and line.startswith("  #"):
            why, fresh = (bare[2:] if fresh else f"{why} {bare[2:]}"), False
        elif match := re.fullmatch(r"(?:- )?(apiGroups|resources|resourceNames|verbs): \[(.*)\]", bare):
            if match[1] == "apiGroups":
                rule, fresh = Rule(role, scope, why, condition, groups=match[2].strip('"')), True
            elif rule is not None:
                _complete(rule, match[1], match[2])
                if match[1] == "verbs":
                    yield rule


def _complete(rule: Rule, field: str, value: str) -> None:
    if field == "resources":
        rule.resources = value
    elif field == "resourceNames":
        rule.names = "as the release" if "$name" in value else "as the certificates' Secret"
    else:
        rule.verbs = re.sub(r"\{\{.*?\}\}", "", value)
        if match := re.search(r"\{\{ if eq \.Values\.(\S+) \"(\w+)\" \}\}(.*?)\{\{", value):
            what = match[3].strip(", ")
            rule.condition = f"{what} with `{match[1]}: {match[2]}`"
