"""Controller and webhook as processes beside a bare API server: variables, certificates, calls, metrics, waiting.

Shared by tests that start them; each says itself what it starts and with which permissions.
"""

from __future__ import annotations

import base64
import os
import pathlib
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection

from testbed.kubectl import Kubectl

ROOT = pathlib.Path(__file__).parents[1]
WRITING = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE"})
_COUNTED = re.compile(r"^apiserver_request_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_NO_STATE = frozenset({"leases", "tokenreviews", "subjectaccessreviews"})


def operator_environment(kubeconfig: pathlib.Path, health_port: int, **settings: object) -> dict[str, str]:
    """The variables of one process; ``settings`` are named as in ``kvshare_operator.settings``."""
    variables = {f"KVSHARE_{name.upper()}": str(value) for name, value in settings.items()}
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'connector'}",
        "KUBECONFIG": str(kubeconfig),
        "KVSHARE_CONNECTOR_IMAGE": "example.org/connector:1",
        "KVSHARE_FULL_PASS_SECONDS": "1",
        "KVSHARE_HEALTH_PORT": str(health_port),
        **variables,
    }


def mount_certificates(kubectl: Kubectl, secret: str, folder: pathlib.Path) -> None:
    """Copy what the webhook would have mounted of a Secret."""
    data = kubectl.get("secret", secret)["data"]
    for key in ("tls.crt", "tls.key", "ca.crt"):
        if key in data:
            (folder / key).write_bytes(base64.b64decode(data[key]))


def ask(
    certificates: pathlib.Path, path: str, port: int, body: bytes | None = None, token: str = ""
) -> tuple[int, str]:
    """Call the webhook process over TLS; return status and text, 0 when it cannot be trusted or reached."""
    try:
        trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    except OSError as error:
        return 0, str(error)
    request = urllib.request.Request(f"https://localhost:{port}{path}", data=body)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, context=trust, timeout=10) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def metric(health_port: int, name: str) -> float:
    """The sum of a metric over all its labels, from a process's `/metrics`; 0 when it is not there."""
    with urllib.request.urlopen(f"http://localhost:{health_port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def api_writes(kubectl: Kubectl, verbs: Collection[str] = WRITING) -> dict[str, float]:
    """How many writes of every resource have reached the API server, by its own count.

    What it writes itself (leases) and reviews are left out.
    """
    found: dict[str, float] = {}
    for labels, count in _COUNTED.findall(kubectl.run("get", "--raw", "/metrics")):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if named["verb"] in verbs and named["resource"] not in _NO_STATE:
            found[named["resource"]] = found.get(named["resource"], 0) + float(count)
    return found


def until(true: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.1)
