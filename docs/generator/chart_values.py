"""reference/chart-values.md, from values.yaml: every key, its default, and the comment above it."""

import json
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML

from generator.source import ROOT, cell

HEAD = """# Values of the chart

`helm install kvshare charts/kvshare --namespace kvshare-system --create-namespace -f values.yaml`; unknown keys are
refused. A key without words of its own is explained by its parent.

| Key | Default | Meaning |
|---|---|---|
"""


def page() -> str:
    """Every value of the chart."""
    text = (ROOT / "charts" / "kvshare" / "values.yaml").read_text()
    lines = text.splitlines()
    rows = []
    for path, value, line in _leaves(YAML(typ="rt").load(text), ()):
        shown = json.dumps(_plain(value))
        rows.append(f"| `{'.'.join(path)}` | `{shown}` | {cell(_comment(lines, line))} |\n")
    return HEAD + "".join(rows)


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, int]]:
    """Every key with a value of its own, and groups that have a comment and only then their keys."""
    for key, value in node.items():
        line = node.lc.key(key)[0]
        if isinstance(value, dict) and value and not value.fa.flow_style():
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value, line


def _comment(lines: list[str], number: int) -> str:
    """The comment lines right above a key; above its parents' keys if the key is the first below them."""
    indent = len(lines[number]) - len(lines[number].lstrip())
    found: list[str] = []
    number -= 1
    while number >= 0:
        line = lines[number].strip()
        if line.startswith("#"):
            found.insert(0, line.lstrip("# "))
        elif line.endswith(":") and not found and len(lines[number]) - len(lines[number].lstrip()) < indent:
            indent = len(lines[number]) - len(lines[number].lstrip())
        else:
            break
        number -= 1
    return " ".join(found)


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, list) else node
