"""Writes what follows from code: reference pages, figures, dashboard: ``python docs/generate.py``.

``--check`` fails on a difference. Needs the environment of the checkout. Nothing on these pages is
written by hand; each has a module in ``generator``.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from generator import (
    annotations,
    chart_values,
    cli,
    connector_config,
    dashboard,
    environment,
    figures,
    kvsharepool,
    metrics,
    permissions,
    reasons,
)

HERE = Path(__file__).parent

PAGES: dict[str, Callable[[], str]] = {
    "../charts/kvshare/dashboards/kvshare.json": dashboard.text,
    "../charts/kvshare/README.md": chart_values.readme,
    "figures/demo.svg": figures.demo,
    "figures/layouts.svg": figures.layouts,
    "figures/replicas.svg": figures.replicas,
    "figures/stages.svg": figures.stages,
    "figures/three-sizes.svg": figures.three_sizes,
    "reference/annotations.md": annotations.page,
    "reference/chart-values.md": chart_values.page,
    "reference/cli.md": cli.page,
    "reference/connector-config.md": connector_config.page,
    "reference/environment.md": environment.page,
    "reference/kvsharepool.md": kvsharepool.page,
    "reference/metrics.md": metrics.page,
    "reference/permissions.md": permissions.page,
    "reference/reasons.md": reasons.page,
}


def main(arguments: list[str]) -> int:
    """Write all pages, or compare them."""
    stale = [name for name, page in PAGES.items() if not _same(HERE / name, page())]
    if "--check" in arguments:
        for name in stale:
            print(f"{_shown(name)} is not what its source says: run make generate")
        return 1 if stale else 0
    for name in stale:
        (HERE / name).parent.mkdir(exist_ok=True)
        (HERE / name).write_text(PAGES[name]())
        print(f"wrote {_shown(name)}")
    return 0


def _shown(name: str) -> str:
    return name.removeprefix("../") if name.startswith("../") else f"docs/{name}"


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
