"""`python -m kvshare_operator webhook|controller`: settings to kopf, nothing else."""

from __future__ import annotations

import argparse
import logging
import os
import sys

import kopf

from kvshare_operator.edges import controller_process, webhook_process
from kvshare_operator.settings import SettingsError, read_settings


def main() -> int:
    """Run one of the two processes until it is told to stop."""
    parser = argparse.ArgumentParser(prog="kvshare_operator", description="KVShare's webhook and controller.")
    parser.add_argument("process", choices=["webhook", "controller"])
    chosen = parser.parse_args().process
    try:
        settings = read_settings(os.environ)
    except SettingsError as error:
        print(f"kvshare_operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("kopf").setLevel(max(logging.getLevelName(settings.log_level), logging.WARNING))
    os.environ.setdefault("POD_ID", f"{chosen}-{os.getpid()}")  # kopf asks for the user's name otherwise
    process = {"webhook": webhook_process, "controller": controller_process}[chosen]
    namespaces = settings.watch_namespaces
    kopf.run(
        registry=process.registry(settings),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
