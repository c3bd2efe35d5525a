"""Installing the product with its chart, as a user does."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from testbed import places
from testbed.demo.place import Place
from testbed.kubectl import Kubectl, NotTrueInTimeError
from testbed.prepare.go_programs import program

NAMESPACE = "kvshare-system"
RELEASE = "kvshare"
CHART = places.REPOSITORY / "charts" / "kvshare"


class InstallError(Exception):
    """helm refused; the text has its answer."""


def install(place: Place, more: Mapping[str, str] | None = None, *, chart: Path = CHART) -> None:
    """Install the chart into a restricted namespace, or upgrade to it, and wait for all its Deployments.

    Args:
        place: the cluster, and the images for it.
        more: further values of the chart, by their dotted path.
        chart: a folder or an archive.

    Raises:
        InstallError: with helm's answer.
        NotTrueInTimeError: if a Deployment is not ready in time, with pods, events and logs.
    """
    levels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    metadata = {"name": NAMESPACE, "labels": levels}
    place.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    _helm(place.kubectl, "upgrade", "--install", RELEASE, str(chart), *_values(place, more or {}))
    wait(place.kubectl)


def wait(kubectl: Kubectl) -> None:
    """Wait for all Deployments of the release.

    Raises:
        NotTrueInTimeError: if one is not ready in time, with pods, events and logs.
    """
    mine = kubectl.within(NAMESPACE)
    names = [thing["metadata"]["name"] for thing in mine.list("deployments")]
    if not names:
        raise NotTrueInTimeError(f"the chart made no Deployments in {NAMESPACE}")
    for name in names:
        mine.wait_for_deployment(name, seconds=300)


def roll_back(kubectl: Kubectl) -> None:
    """Go back to the revision before, and wait for it."""
    _helm(kubectl, "rollback", RELEASE)
    wait(kubectl)


def uninstall(kubectl: Kubectl) -> None:
    """Remove the release; the namespace stays."""
    _helm(kubectl, "uninstall", RELEASE, "--ignore-not-found")


def _values(place: Place, more: Mapping[str, str]) -> list[str]:
    operator, _, operator_tag = place.operator_image.rpartition(":")
    connector, _, connector_tag = place.connector_image.rpartition(":")
    values = {
        "image.repository": operator,
        "image.tag": operator_tag,
        "image.pullPolicy": place.pull_policy,
        "connector.image.repository": connector,
        "connector.image.tag": connector_tag,
        "connector.image.pullPolicy": place.pull_policy,
    }
    texts = [word for name, value in values.items() for word in ("--set-string", f"{name}={value}")]
    return [*texts, *(word for name, value in more.items() for word in ("--set", f"{name}={value}"))]


def _helm(kubectl: Kubectl, *words: str) -> None:
    options = ["--kubeconfig", str(kubectl.kubeconfig), "--namespace", NAMESPACE]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
    finished = subprocess.run(
        [str(program("helm")), *words, *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if finished.returncode != 0:
        raise InstallError(f"helm {' '.join(words)}:\n{finished.stderr.strip()}")
