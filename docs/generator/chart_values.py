"""reference/chart-values.md and the chart's README, from values.yaml: every key, its default, the comment above it."""

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

README = """# KVShare

vLLM deployments with different tensor-parallel sizes and KV-cache layouts share one KV cache. This chart installs the
operator: a webhook that configures pods which opt in with one annotation, a controller that keeps the status of their
pools, and the resource KVSharePool.

```
helm install kvshare charts/kvshare --namespace kvshare-system --create-namespace
helm test kvshare --namespace kvshare-system
```

Kubernetes 1.30 or later. The webhook fails open: while it is away, pods start without sharing, and their pool's status
names them. `helm uninstall` leaves running engines alone and keeps the resource with all pools.

| Question | Page |
|---|---|
| From nothing to engines that share | [own-cluster.md](../../docs/howto/own-cluster.md) |
| Who makes the webhook's certificate | [certificates.md](../../docs/howto/certificates.md) |
| Permissions in some namespaces only | [namespaces.md](../../docs/howto/namespaces.md) |
| RDMA | [rdma.md](../../docs/howto/rdma.md) |
| A store that the operator runs | [managed-store.md](../../docs/howto/managed-store.md) |
| Dashboard, alerts, monitors | [monitoring.md](../../docs/howto/monitoring.md) |
| Every permission with its purpose | [permissions.md](../../docs/reference/permissions.md) |

## Values

Written from `values.yaml` by `make generate`. Unknown keys are refused; values that contradict each other are refused
with what to do. A key without words of its own is explained by its parent.

| Key | Default | Meaning |
|---|---|---|
"""


def readme() -> str:
    """The chart's README."""
    return README + "".join(_rows())


def page() -> str:
    """Every value of the chart."""
    return HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    text = (ROOT / "charts" / "kvshare" / "values.yaml").read_text()
    lines = text.splitlines()
    for path, value, line in _leaves(YAML(typ="rt").load(text), ()):
        shown = json.dumps(_plain(value))
        yield f"| `{'.'.join(path)}` | `{shown}` | {cell(_comment(lines, line))} |\n"


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
