"""reference/reasons.md: the operator's table of reasons, and the connector's checks."""

import ast
import re

from generator.source import cell, text_of, tree
from kvshare_layout import checks
from kvshare_operator.api.member_reasons import MEMBER_REMEDIES
from kvshare_operator.api.reasons import REASONS, Reason

HEAD = """# Reason codes

A reason code is the same word everywhere: in the record annotation of a pod, in warnings and denials of the API
server, in conditions and `status.problems` of a pool, in the command line, in logs and in metrics.
`<...>` stands for what is filled in.
"""

PARTS = (
    ("", "Pods that are not injected", "Found by the webhook and by `kvshare inject`. With `onConflict: Skip` the pod "
     "starts as it was, with the reason in its record annotation and a warning; with `Reject` it is denied. Reasons "
     "marked *ours* never deny a pod."),
    ("inject", "Manifests", "Found by `kvshare inject` only."),
    ("status", "Pools", "In the pool's conditions and `status.problems`, and from `kvshare check`."),
    ("reported by a member", "Images", "Reported by members."),
    ("plan", "Plans", "Found by `kvshare plan`."),
)  # fmt: skip

MEMBERS = """
## Members that do not share

An engine decides once, at its start, and reports. *isolated* members keep to a namespace of their own: they find what
they stored themselves, nobody else does. *disabled* members serve without any cache of ours. The first check that
speaks decides. A message that is `<...>` names the mistakes that were found.

| Reason | State | Message |
|---|---|---|
"""

REMEDIES = """
What to do; `kvshare check` prints it below the message:

| Reason | Remedy |
|---|---|
"""

PROBLEM_SOURCES = (
    "connector/kvshare_connector/connector.py",
    "connector/kvshare_connector/compat.py",
    "connector/kvshare_connector/scheduler/engine_facts.py",
    "connector/kvshare_connector/worker/facts.py",
    "connector/kvshare_connector/worker/glue.py",
)
"""Where problems are written as `Reason: message`; all of them disable."""
LATER = "connector/kvshare_connector/scheduler/membership.py"
"""Where an engine that has decided gives up: `self._disabled(reason, message)`."""


def page() -> str:
    """Every reason code with its cause and remedy."""
    out = [HEAD]
    for mark, title, text in PARTS:
        rows = [row for row in REASONS.values() if _mark(row) == mark]
        if rows:
            out.append(f"\n## {title}\n\n{text}\n")
            out.extend(_operator_row(row) for row in rows)
    out.append(MEMBERS)
    seen = set()
    for code, state, message in _member_rows():
        anchor = "" if code in REASONS or code in seen else f'<a id="{code}"></a>'
        seen.add(code)
        out.append(f"| {anchor}`{code}` | {state} | {cell(_shown(message))} |\n")
    out.append(REMEDIES)
    out.extend(f"| `{code}` | {cell(text)} |\n" for code, text in sorted(MEMBER_REMEDIES.items()))
    return "".join(out)


def _mark(row: Reason) -> str:
    match = re.match(r"\(([^)]*)\)", row.trigger)
    return match[1] if match else ""


def _operator_row(row: Reason) -> str:
    trigger = re.sub(r"^\([^)]*\) *", "", row.trigger)
    trigger = trigger[:1].upper() + trigger[1:]
    ours = " *(ours)*" if row.ours else ""
    return (
        f'\n### <a id="{row.code}"></a>{row.code}\n\n{trigger}{ours}\n\n'
        f"* Message: {_shown(_filled(row.message))}\n* Remedy: {_shown(_filled(row.remedy))}\n"
    )


def _filled(template: str) -> str:
    return re.sub(r"\{(\w+)(?:!r)?\}", r"<\1>", template)


def _shown(text: str) -> str:
    """What is filled in must not look like HTML."""
    return re.sub(r"<([\w.]+)>", r"*\1*" if "`" in text else r"`<\1>`", text)


def _member_rows() -> list[tuple[str, str, str]]:
    states = {check.__name__: state for state, check in checks.CHECKS}
    rows: list[tuple[str, str, str]] = []
    for function in tree("connector/kvshare_layout/checks.py").body:
        if isinstance(function, ast.FunctionDef):
            state = states.get(function.name, checks.DISABLED)
            rows.extend((code, state, message) for code, message in _returned(function))
    for path in PROBLEM_SOURCES:
        rows.extend((code, checks.DISABLED, message) for code, message in _prefixed(tree(path)))
    rows.extend((code, checks.DISABLED, message) for code, message in _given_up(tree(LATER)))
    order = {checks.DISABLED: 0, checks.ISOLATED: 1}
    return sorted(dict.fromkeys(rows), key=lambda row: (order[row[1]], row[0]))


def _returned(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """The `(reason, message)` pairs that a check returns, in any form of a return statement."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            code, message = text_of(node.elts[0]), text_of(node.elts[1])
            if code and re.fullmatch(r"([A-Z][A-Za-z]+)+", code):
                found.append((code, message or "<...>"))
    return found


def _given_up(module: ast.Module) -> list[tuple[str, str]]:
    """The `(reason, message)` of every call of `_disabled` that names its reason."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._disabled" and len(node.args) == 2:
            code, message = text_of(node.args[0]), text_of(node.args[1])
            if code:
                found.append((code, message or "<...>"))
    return found


def _prefixed(module: ast.Module) -> list[tuple[str, str]]:
    prose = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(module):
        if id(node) in prose | inner:
            continue
        match = re.fullmatch(r"([A-Z]\w+[a-z]): (.+)", text_of(node) or "", re.DOTALL)
        if match and re.search(r"[a-z][A-Z]", match[1]):
            found.append((match[1], match[2]))
    return found
