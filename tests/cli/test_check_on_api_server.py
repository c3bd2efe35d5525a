"""`kvshare check` as people run it, as a process with a kubeconfig, against a real kube-apiserver."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from kvshare_operator.api import names
from pods import pod_p0, pool_p1
from testbed.cluster import Cluster, api_server

pytestmark = pytest.mark.apiserver
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def api() -> Iterator[Cluster]:
    """An API server without our resource."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as running,
    ):
        yield running


def run(kubeconfig: object, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    code = "from kvshare_operator.cli.main import main; main()"
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    return subprocess.run(
        [sys.executable, "-c", code, "check", *words], env=environment, capture_output=True, text=True, check=False
    )


def test_check_from_no_cluster_to_a_pool_whose_pod_was_missed(api: Cluster, tmp_path: pathlib.Path) -> None:
    """No kubeconfig, no resource, no pools, then a pool without operator: each has its exit code and words."""
    assert run(tmp_path / "none").returncode == 3
    missing = run(api.kubeconfig)
    assert (missing.returncode, "helm install" in missing.stderr) == (1, True)
    api.kubectl.apply((ROOT / "crds" / "kvshare.dev_kvsharepools.yaml").read_text())
    api.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
    empty = run(api.kubeconfig, "-A")
    assert (empty.returncode, "No pools." in empty.stdout) == (0, True)

    pool, pod = pool_p1(), pod_p0()
    pool["metadata"] = {"name": "p1", "namespace": "default"}
    pod["metadata"]["namespace"] = "default"
    pod["spec"]["automountServiceAccountToken"] = False
    api.kubectl.apply(pool)
    api.kubectl.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}})
    api.kubectl.apply(pod)
    checked = run(api.kubeconfig, "-o", "json")
    assert checked.returncode == 1, checked.stderr
    found = json.loads(checked.stdout)
    assert found["webhook"] == {"dryRunInjected": False, "certExpires": None}
    assert found["pools"][0]["owners"] == [
        {
            "name": "pod/p0",
            "pods": 1,
            "state": "notInjected",
            "reason": "NotInjected",
            "restartCommand": "kubectl -n default delete pod/p0",
        }
    ]
    assert "was not touched" in checked.stderr
    left = [one["metadata"]["name"] for one in api.kubectl.list("pods")]
    assert left == ["p0"], "a dry run stores nothing"
    assert names.INJECTED not in api.kubectl.get("pod", "p0")["metadata"]["annotations"]
