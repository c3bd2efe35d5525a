"""Results of long runs, kept between runs, so that one part can be run again without the others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed import places

Rows = dict[str, dict[str, str]]


@contextmanager
def rows(name: str) -> Iterator[Rows]:
    """Rows of a table, by version and column, as earlier runs left them; changes are kept whatever happens.

    Args:
        name: of the table.
    """
    file = places.BUILD / "tables" / f"{name}.json"
    found: Rows = json.loads(file.read_text()) if file.exists() else {}
    try:
        yield found
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1))


def write(path: Path, lines: list[str]) -> None:
    """Write a page of the documentation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
