"""reference/connector-config.md, from the connector's configuration class."""

import re

from generator.source import cell
from kvshare_layout.config import ConnectorConfig

HEAD = """# Keys of `kv_connector_extra_config`

The operator writes them; without an operator they are set by hand:

```
--kv-transfer-config.kv_connector=KVShareConnector
--kv-transfer-config.kv_connector_module_path=kvshare_connector.connector
--kv-transfer-config.kv_role=kv_both
--kv-transfer-config.kv_load_failure_policy=recompute
--kv-transfer-config.kv_connector_extra_config.store_tp_size=4
```

`kv_load_failure_policy=recompute` matters: vLLM's default fails a request whose load failed.
Strings that look like a number, `true`, `false` or `null` are written with the prefix `s:`, lists as `s:4,2`.
Unknown keys and malformed values make the member `isolated`, with every mistake named; they never stop an engine.

| Key | Default | Meaning |
|---|---|---|
"""


def page() -> str:
    """The keys of the connector's configuration."""
    described = re.findall(r"^        (\w+): (.*(?:\n            .*)*)", ConnectorConfig.__doc__ or "", re.MULTILINE)
    default = ConnectorConfig()
    rows = []
    for name, text in described:
        value = getattr(default, name)
        shown = "" if value in ((), "", None) else f"`{str(value).lower() if isinstance(value, bool) else value}`"
        rows.append(f"| `{name}` | {shown} | {cell(text)} |\n")
    return HEAD + "".join(rows)
