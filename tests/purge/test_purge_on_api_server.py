"""`kvshare purge` as people run it, on a real kube-apiserver: the way to a master's HTTP port leads over its pod."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest

from pods import Json, pool_p1
from stored_keys import block_keys, prefix_at
from testbed.cluster import Cluster, api_server

pytestmark = pytest.mark.apiserver
ROOT = pathlib.Path(__file__).parents[2]
KEYS = [*block_keys(prefix_at(1, namespace="default"), 3), "somebody/else"]


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers like the HTTP port of a Mooncake master, without a word."""

    def do_GET(self) -> None:
        """Keys, and the size of one of them."""
        asked = self.path.partition("?key=")[2]
        found = asked in KEYS or not asked
        body = json.dumps({"success": True, "data": [{"size_": 1024}]}) if asked else "\n".join(KEYS) + "\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


def own_address() -> str:
    """An address of this machine that is not the loopback, to which API servers do not lead anybody."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def master(address: str) -> Iterator[int]:
    """A stand-in for a master's HTTP port; yields the port."""
    server = http.server.ThreadingHTTPServer((address, 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def api() -> Iterator[Cluster]:
    """An API server with our resource and pool p1 at generation 2."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as running,
    ):
        running.kubectl.apply((ROOT / "crds" / "kvshare.dev_kvsharepools.yaml").read_text())
        running.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
        store = {"type": "External", "external": {"masterAddress": "mooncake:50051"}}
        pool = pool_p1(model={"name": "org/m", "generation": 2}, store=store)
        pool["metadata"] = {"name": "p1", "namespace": "default"}
        running.kubectl.apply(pool, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}})
        yield running


def purge(api: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    code = "from kvshare_operator.cli.main import main; main()"
    environment = {**os.environ, "KUBECONFIG": str(api.kubeconfig)}
    command = [sys.executable, "-c", code, "purge", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_keys_are_listed_through_the_masters_pod(api: Cluster) -> None:
    """Service to pod to port, with the user's own credentials; before the pod runs, the other way is named."""
    address = own_address()
    if not address or address.startswith("127."):
        pytest.skip("this machine has the loopback only")
    service: Json = {"selector": {"app": "mooncake"}, "ports": [{"port": 50051}]}
    labels = {"name": "mooncake", "labels": {"app": "mooncake"}}
    container = {"name": "master", "image": "example.org/mooncake:1"}
    spec = {"containers": [container], "automountServiceAccountToken": False}
    api.kubectl.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "mooncake"}, "spec": service},
        {"apiVersion": "v1", "kind": "Pod", "metadata": labels, "spec": spec},
    )
    waiting = purge(api)
    assert (waiting.returncode, "--master-http" in waiting.stderr) == (3, True), waiting.stderr
    with master(address) as port:
        status = {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}
        api.kubectl.run("patch", "pod", "mooncake", "--subresource=status", "--type=merge", "-p", json.dumps(status))
        listed = purge(api, "--http-port", str(port), "-o", "json")
        assert listed.returncode == 0, listed.stderr
        rows = json.loads(listed.stdout)["rows"]
        assert [(row["objects"], row["bytes"], row["state"]) for row in rows] == [(6, 6144, "old"), (1, 1024, "old")]
        assert json.loads(listed.stdout)["otherKeys"] == 1
        told = purge(api, "--http-port", str(port), "--delete", "--yes")
        assert told.returncode == 1
        assert "Nothing was deleted" in told.stderr
        assert "where Mooncake is installed" in told.stderr
