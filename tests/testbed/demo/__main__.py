"""`python -m testbed.demo [--keep]`: the whole demo; 0 when every row is right. `make demo` prepares first."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from testbed import places
from testbed.cluster import ClusterImpossibleError, cluster
from testbed.completions import ServerError
from testbed.demo import product, table
from testbed.demo.place import GivenCluster, OwnCluster, Place, forwards
from testbed.demo.report import Report
from testbed.demo.settings import Settings, SettingsError, from_environment
from testbed.demo.steps import NAMESPACE, Demo
from testbed.kubectl import Kubectl, KubectlError, NotTrueInTimeError
from testbed.prepare.go_programs import program
from testbed.prepare.python_environment import own_version
from testbed.process import NotReadyError

REPORT = places.BUILD / "demo" / "report.json"
PREPARE_SECONDS = "KVSHARE_PREPARE_SECONDS"
"""Variable by which `make demo` tells how long the preparation took."""

EXPECTED_ERRORS = (
    ClusterImpossibleError,
    KubectlError,
    NotReadyError,
    NotTrueInTimeError,
    ServerError,
    product.InstallError,
)


def main() -> int:
    """Run the demo as the command line and the environment say."""
    parser = argparse.ArgumentParser(prog="python -m testbed.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")
    keep = parser.parse_args().keep
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 160)
    begin = time.monotonic()
    try:
        settings = from_environment(os.environ)
        with _place(settings, keep=keep, console=console) as (place, cluster_seconds):
            demo = Demo(place, settings, lambda text: console.print(text, markup=False))
            demo.report.seconds["prepare"] = float(os.environ.get(PREPARE_SECONDS, "0"))
            demo.report.seconds["cluster"] = cluster_seconds
            run(demo)
            demo.report.seconds["total"] = demo.report.seconds["prepare"] + time.monotonic() - begin
            show(demo, console)
            if keep:
                _explain_kept(place, console)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except EXPECTED_ERRORS as error:
        print(f"\nThe demo stopped: {error}", file=sys.stderr)
        return 1
    return 0 if demo.report.right else 1


def run(demo: Demo) -> Report:
    """All steps, in order."""
    demo.install_product()
    demo.start_store()
    demo.apply_pool()
    demo.start_engines()
    with demo.timed("requests", "asking the engines"):
        demo.prefill_writes()
        demo.decode_reads()
        demo.decode_continues()
        demo.prefill_reads_back()
    demo.refuse_wrong_size()
    demo.finish()
    return demo.report


def show(demo: Demo, console: Console) -> None:
    """Print the pool, the refusal and the table; write the report."""
    console.print(demo.kubectl.describe("kvsharepool", "demo"), markup=False)
    console.print(f"The pod with TP {demo.settings.refused_tp}:\n    {demo.report.refusal}\n", markup=False)
    table.show(demo.report, console)
    for problem in demo.report.problems:
        console.print(f"WRONG: {problem}", style="red", markup=False)
    demo.report.write(REPORT)
    outcome = "every row is right" if demo.report.right else "something is wrong"
    total = demo.report.seconds["total"]
    console.print(f"{outcome}; {total:.0f} s; written to {REPORT.relative_to(places.REPOSITORY)}")


@contextmanager
def _place(settings: Settings, *, keep: bool, console: Console) -> Iterator[tuple[Place, float]]:
    """The cluster to use, and how many seconds its start took."""
    if settings.existing_cluster:
        kubeconfig = Path(os.environ["KUBECONFIG"])
        with forwards(places.BUILD / "demo" / "logs") as forwarded:
            given = GivenCluster(
                kubeconfig,
                registry=settings.image_registry,
                version=own_version(),
                vllm_image=settings.vllm_image,
                forwards=forwarded,
            )
            try:
                yield given, 0.0
            finally:
                if not keep:
                    console.print("removing the demo from the cluster")
                    remove_from(given.kubectl)
        return
    console.print("starting a one-node cluster")
    start = time.monotonic()
    archives = OwnCluster.archives()
    with cluster(places.DEMO_STATE, images=archives, keep=keep) as running:
        seconds = time.monotonic() - start
        console.print(f"    {seconds:.0f} s")
        yield OwnCluster(running), seconds
        if not keep:
            console.print("stopping the cluster")


def remove_from(kubectl: Kubectl) -> None:
    """Remove everything that the demo made in somebody's cluster, the product's CRD included."""
    product.uninstall(kubectl)
    for namespace in (NAMESPACE, product.NAMESPACE):
        kubectl.delete("namespace", namespace, "--wait=false")


def _explain_kept(place: Place, console: Console) -> None:
    lines = (
        "",
        "The cluster keeps running. Use it:",
        f"    export KUBECONFIG={place.kubectl.kubeconfig}",
        f"    export PATH={program('kubectl').parent}:{program('helm').parent}:$PATH",
        "    kubectl --namespace kvshare-demo get kvsharepool,pods",
        "End it: make demo-down",
    )
    console.print("\n".join(lines), markup=False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; everything was stopped", file=sys.stderr)
        sys.exit(130)
