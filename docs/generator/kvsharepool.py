"""reference/kvsharepool.md, from the generated schema of the resource and the names of its conditions."""

import json
from typing import Any

from generator.source import cell
from kvshare_operator.api import crd, names

HEAD = f"""# KVSharePool

`{names.API_VERSION}`, namespaced, short name `{names.SHORT_NAME}`. A pool serves pods of its own namespace.
Three facts are enough: the model, the tensor-parallel sizes, the store.

```yaml
apiVersion: {names.API_VERSION}
kind: {names.KIND}
metadata: {{name: llama-70b, namespace: inference}}
spec:
  model: {{name: meta-llama/Llama-3.3-70B-Instruct}}
  prefill: {{tensorParallelSizes: [4, 2]}}
  decode: {{tensorParallelSizes: [2]}}
  store:
    type: External
    external: {{masterAddress: "mooncake-master.mooncake.svc.cluster.local:50051"}}
```

A change reaches new pods only; running pods are never restarted. What a running pod uses, and how to restart it, is
in the status.
"""
CONDITIONS = (
    (names.ACCEPTED, "The spec can be used: it fits its schema, and the cluster can do what it asks for."),
    (names.STORE_TP_RESOLVED, "Store TP is known; the message says how it came about."),
    (names.STORE_REACHABLE, "The store's master answers the operator: a connection, and now and then a call."),
    (names.MEMBERS_CONSISTENT, "Every pod that opted in shares one namespace and one fingerprint."),
    (names.READY, "The three facts about the pool hold: engines that opt in are injected."),
)
TABLE = "\n| Field | Type | Default | Bounds | Meaning |\n|---|---|---|---|---|\n"


def page() -> str:
    """Every field, rule and condition of the resource."""
    schema = crd.structural_schema()
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    conditions = "".join(f"| `{name}` | {text} |\n" for name, text in CONDITIONS)
    return (
        f"{HEAD}\n## Spec\n{TABLE}{''.join(_rows(spec, 'spec'))}"
        f"\n## Rules\n\nChecked by the API server at every change, besides the bounds above.\n\n"
        f"{''.join(dict.fromkeys(_rules(schema, '')))}"
        f"\n## Status\n{TABLE}{''.join(_rows(status, 'status'))}"
        "\n## Conditions\n\nReasons of conditions that are `False` are in [reason codes](reasons.md); `NotTried` means "
        "that nobody has looked yet.\n\n"
        f"| Type | True means |\n|---|---|\n{conditions}"
    )


def _rows(node: dict[str, Any], path: str) -> list[str]:
    rows = []
    required = node.get("required", [])
    for name, child in node.get("properties", {}).items():
        where = f"{path}.{name}"
        default = "*required*" if name in required else ""
        if "default" in child and child.get("type") != "object":
            default = f"`{json.dumps(child['default'])}`"
        meaning = cell(child.get("description", ""))
        rows.append(f"| `{where}` | {_type(child)} | {default} | {_bounds(child)} | {meaning} |\n")
        inner = child.get("items", {}) if child.get("type") == "array" else child
        rows.extend(_rows(inner, f"{where}[]" if inner is not child else where))
    return rows


def _type(node: dict[str, Any]) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if node.get("type") == "array":
        kind = {"set": "set", "map": "list"}.get(node.get("x-kubernetes-list-type", ""), "list")
        return f"{kind} of {_type(node['items'])}s"
    if "additionalProperties" in node:
        return f"map of {_type(node['additionalProperties'])}s"
    return str(node.get("format") if node.get("format") == "date-time" else node.get("type", ""))


def _bounds(node: dict[str, Any]) -> str:
    parts = []
    if "enum" in node:
        parts.append(", ".join(f"`{value}`" for value in node["enum"]))
    for low, high, unit in (
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " entries"),
        ("", "maxProperties", " entries"),
    ):
        if low in node or high in node:
            parts.append(f"{node.get(low, '')}..{node.get(high, '')}{unit}")
    if node.get("type") == "array" and (inner := _bounds(node["items"])):
        parts.append(f"each {inner}")
    return "; ".join(parts)


def _rules(node: dict[str, Any], path: str) -> list[str]:
    rows = [f"* `{path or 'object'}`: {rule['message']}\n" for rule in node.get("x-kubernetes-validations", [])]
    for name, child in node.get("properties", {}).items():
        rows.extend(_rules(child, f"{path}.{name}".lstrip(".")))
    return rows
