"""`kvshare must-gather` as people run it, as a process with a kubeconfig, against a real kube-apiserver."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

import pytest

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
        pod["spec"]["automountServiceAccountToken"] = False
        api.kubectl.apply(pool)
        api.kubectl.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}})
        api.kubectl.apply(pod)
        target = tmp_path / "gathered.tar.gz"
        code = "from kvshare_operator.cli.main import main; main()"
        run = subprocess.run(
            [sys.executable, "-c", code, "must-gather", "-o", str(target)],
            env={**os.environ, "KUBECONFIG": str(api.kubeconfig)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    with tarfile.open(target) as archive:
        found = {name.partition("/")[2]: archive.extractfile(name) for name in archive.getnames()}
        texts = {name: file.read().decode() for name, file in found.items() if file is not None}
    assert "org/m" in texts["pools/default/p1/pool.yaml"]
    assert "***masked***" in texts["pools/default/p1/members.yaml"]
    assert "s3cretvalue0" not in "".join(texts.values())
    assert "v1alpha1" in texts["resource-definition.yaml"]
    assert "log of default/p0, container vllm" in texts["missing.txt"]
    assert "p1" in texts["check.txt"]
