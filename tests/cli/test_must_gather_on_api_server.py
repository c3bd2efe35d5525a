"""`kvshare must-gather` as people run it, as a process with a kubeconfig, against a real kube-apiserver."""

from __future__ import annotations

import pathlib
import tempfile

import pytest

from gathered import gathered
from kvshare_operator.api import names
from pods import pod_p0, pool_p1
from testbed.cluster import api_server

pytestmark = pytest.mark.apiserver
ROOT = pathlib.Path(__file__).parents[2]


def test_an_installation_without_kubelets_gives_an_archive(tmp_path: pathlib.Path) -> None:
    """Pool and member are in it; what a real server refuses or lacks (logs of a pod that runs nowhere) is noted."""
    with tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder, api_server(pathlib.Path(folder) / "s") as api:
        api.kubectl.apply((ROOT / "crds" / "kvshare.dev_kvsharepools.yaml").read_text())
        api.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
        pool, pod = pool_p1(), pod_p0(env=[{"name": "HF_TOKEN", "value": "s3cretvalue0"}])
        pool["metadata"] = {"name": "p1", "namespace": "default"}
        pod["metadata"].update(namespace="default", labels={names.MEMBER: "p1"})
        pod["spec"].update(automountServiceAccountToken=False, nodeName="gone")
        api.kubectl.apply(pool)
        api.kubectl.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}})
        api.kubectl.apply(pod)
        texts = gathered(api.kubeconfig, tmp_path / "gathered.tar.gz")
    assert "org/m" in texts["pools/default/p1/pool.yaml"]
    assert "***masked***" in texts["pools/default/p1/members.yaml"]
    assert "s3cretvalue0" not in "".join(texts.values())
    assert "v1alpha1" in texts["resource-definition.yaml"]
    assert "log of default/p0, container vllm" in texts["missing.txt"]
    assert "406" not in texts["missing.txt"]  # what is asked for is refused by nobody
    assert "p1" in texts["check.txt"]
