"""The API server over one kept connection, for tests that ask more often than kubectl can be started.

kubectl takes a tenth of a second of a core to start; a load of twenty pods a second needs something lighter.
"""

import base64
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def api_client(kubeconfig: Path) -> Iterator[httpx.Client]:
    """A client of the test bed's own kubeconfig, with its token and its CA."""
    config = json.loads(kubeconfig.read_text())
    (cluster,), (user,) = config["clusters"], config["users"]
    authority = base64.b64decode(cluster["cluster"]["certificate-authority-data"]).decode()
    with httpx.Client(
        base_url=cluster["cluster"]["server"],
        headers={"Authorization": f"Bearer {user['user']['token']}"},
        verify=ssl.create_default_context(cadata=authority),
        timeout=30,
    ) as client:
        yield client
