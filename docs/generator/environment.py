"""reference/environment.md: variables of the operator's processes, and those that matter to an engine."""

import dataclasses
import json
import re

from generator.source import cell
from kvshare_connector.store.settings import CONFIG_PATH, StoreSettings, environment
from kvshare_operator.api import names
from kvshare_operator.settings import Settings

HEAD = """# Environment variables

## Operator

The chart sets them; `controller` and `webhook` read the same ones, once, at their start. Wrong values are all
named, and the process ends.

| Variable | Default | Meaning |
|---|---|---|
"""
ENGINES = f"""
## Engines

| Variable | Who sets it | Meaning |
|---|---|---|
| `{names.ARGS_VARIABLE}` | webhook | vLLM's further arguments, for shell scripts that reference it without quotes |
| `PYTHONPATH` | webhook | `{names.PAYLOAD_PATH}` in front of what the pod says, when the code is delivered by us |
| `{CONFIG_PATH}` | you | the store's settings in vLLM's own form; read only without `master_server_address` |
| `PYTHONHASHSEED` | you | the same number on every member, or unset; `random` is refused |
"""
MOONCAKE = """
The connector sets these for Mooncake, inside the engine's processes, where nobody has set them:

| Variable | Value |
|---|---|
"""


def page() -> str:
    """All variables."""
    described = _described()
    rows = []
    for field in dataclasses.fields(Settings):
        variable = f"KVSHARE_{field.name.upper()}"
        rows.append(f"| `{variable}` | {_shown(field.default)} | {cell(described[field.name])} |\n")
    plain, rdma = (environment(StoreSettings("host:1", protocol=protocol)) for protocol in ("tcp", "rdma"))
    values = [f"| `{name}` | `{value}`{'' if name in plain else ' with RDMA'} |\n" for name, value in rdma.items()]
    return HEAD + "".join(rows) + ENGINES + MOONCAKE + "".join(values)


def _described() -> dict[str, str]:
    """Field -> words of the class's own docstring, without the variable that they name."""
    found = re.findall(r"^        (\w+): (.*(?:\n            .*)*)", Settings.__doc__ or "", re.MULTILINE)
    return {
        name: re.sub(r"\s*\(KVSHARE_\w+(?:, ([^)]*))?\)", r" (\1)", text).replace(" ()", "") for name, text in found
    }


def _shown(value: object) -> str:
    if value in ("", ()):
        return ""
    if isinstance(value, tuple):
        return "vLLM's own images"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"
