"""reference/annotations.md, from the operator's list of names."""

from generator.source import cell, constants_with_docstrings

NAMES = "operator/kvshare_operator/api/names.py"
HEAD = """# Annotations, labels and conditions

Annotations that users write belong into the **pod template** (`spec.template.metadata.annotations`), not on the
Deployment itself; `kvshare inject` points out misplaced ones. Misspelled names that begin with `kvshare.dev/`
have no effect; the webhook's warnings and `kvshare inject` name them. Values are text: numbers need quotes.
"""
EXAMPLE = """
## Roles

| Role | Sizes it may have | Reads | Stores |
|---|---|---|---|
| `prefill` | `prefill`'s | yes | blocks of prompts |
| `decode` | `decode`'s | yes | **nothing**; with `saveDecodeCache: Enabled` what it computes itself and generates |
| `both` | both lists | yes | blocks of prompts; with `saveDecodeCache: Enabled` also what it generates |

Reserved sizes are allowed in every role; `saveDecodeCache` stands under `decode` of the pool. An engine that answers
whole requests, with no prefill engine in front of it, is `both`.

## Example

```yaml
spec:
  template:
    metadata:
      annotations:
        kvshare.dev/pool: llama-70b
        kvshare.dev/role: prefill
        kvshare.dev/tensor-parallel-size: "4"   # only if the command line does not show it
```

`kubectl wait --for=condition=kvshare.dev/Shared pod/NAME` waits until a member has reported that it shares.
"""


def page() -> str:
    """Every name that users meet on pods."""
    out, last = [HEAD], ""
    for section, _, value, text in constants_with_docstrings(NAMES):
        if not value or "/" not in value or not value.startswith("kvshare.dev/") or not text:
            continue
        if section != last:
            title = section[:1].upper() + section[1:]
            out.append(f"\n## {title}\n\n| Name | Meaning |\n|---|---|\n")
            last = section
        out.append(f"| `{value}` | {cell(text)} |\n")
    return "".join(out) + EXAMPLE
