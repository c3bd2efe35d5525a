"""Writes the reference pages that follow from code: ``python docs/generate.py``, ``--check`` fails on a difference.

Needs the environment of the checkout. Nothing on these pages is written by hand.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from kvshare_layout.config import ConnectorConfig

HERE = Path(__file__).parent

CONFIG_HEAD = """# Keys of `kv_connector_extra_config`

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


def connector_config() -> str:
    """The keys of the connector's configuration."""
    described = re.findall(r"^        (\w+): (.*(?:\n            .*)*)", ConnectorConfig.__doc__ or "", re.MULTILINE)
    default = ConnectorConfig()
    rows = []
    for name, text in described:
        value = getattr(default, name)
        shown = "" if value in ((), "", None) else f"`{str(value).lower() if isinstance(value, bool) else value}`"
        meaning = " ".join(text.split()).replace("``", "`")
        rows.append(f"| `{name}` | {shown} | {meaning} |\n")
    return CONFIG_HEAD + "".join(rows)


PAGES: dict[str, Callable[[], str]] = {"reference/connector-config.md": connector_config}


def main(arguments: list[str]) -> int:
    """Write all pages, or compare them."""
    stale = [name for name, page in PAGES.items() if not _same(HERE / name, page())]
    if "--check" in arguments:
        for name in stale:
            print(f"docs/{name} is not what its source says: run make generate")
        return 1 if stale else 0
    for name in stale:
        (HERE / name).parent.mkdir(exist_ok=True)
        (HERE / name).write_text(PAGES[name]())
        print(f"wrote docs/{name}")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
