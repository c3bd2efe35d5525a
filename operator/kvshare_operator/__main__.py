"""`python -m kvshare_operator webhook|controller`: settings to kopf, nothing else. `dry-run` is the chart's test."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

import kopf

from kvshare_operator.edges import controller_process, webhook_process
from kvshare_operator.edges.cluster_api import HttpClusterApi
from kvshare_operator.edges.dry_run import dry_run
from kvshare_operator.settings import SettingsError, read_settings


def main() -> int:
    """Run one of the two processes until it is told to stop, or one dry run."""
    parser = argparse.ArgumentParser(prog="kvshare_operator", description="KVShare's webhook and controller.")
    parser.add_argument("process", choices=["webhook", "controller", "dry-run"])
    parser.add_argument("--namespace", default="default", help="dry-run: where the pod would be created")
    given = parser.parse_args()
    chosen = given.process
    if chosen == "dry-run":
        return asyncio.run(_dry_run(given.namespace))
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


async def _dry_run(namespace: str) -> int:
    api = HttpClusterApi()
    try:
        good, sentence = await dry_run(api, namespace)
    finally:
        await api.close()
    print(sentence, file=sys.stdout if good else sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
