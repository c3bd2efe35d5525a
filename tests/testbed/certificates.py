"""Keys and tokens of a cluster, made with openssl: it is there before any Python package is."""

import base64
import json
import secrets
import subprocess
from pathlib import Path


def make_signing_key(file: Path) -> None:
    """The key that signs service accounts' tokens; kept when it exists."""
    if not file.exists():
        subprocess.run(["openssl", "genrsa", "-out", str(file), "2048"], check=True, capture_output=True)


def make_token(file: Path) -> str:
    """A new administrator's token, and the file from which the API server learns it."""
    token = secrets.token_hex(16)
    file.touch(mode=0o600)
    file.write_text(f"{token},admin,admin,system:masters\n")
    return token


def write_kubeconfig(file: Path, *, server: str, token: str, authority: Path) -> None:
    """A kubeconfig (JSON is YAML too) of the administrator.

    Args:
        file: where to write it.
        server: the API server's address.
        token: the administrator's.
        authority: certificate that signs the server's.
    """
    data = base64.b64encode(authority.read_bytes()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "testbed", "cluster": {"server": server, "certificate-authority-data": data}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "admin"}}],
        "current-context": "testbed",
    }
    file.touch(mode=0o600)
    file.write_text(json.dumps(config, indent=1))
