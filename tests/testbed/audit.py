"""What the operator asked the API server for, from the server's own audit log.

Every API server of the test bed records the requests of accounts in the operator's namespace, without their bodies.
Standard library only: the cluster is started before any Python package is there.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMESPACE = "kvshare-system"
LOG = "audit.log"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:"


def flags(folder: Path) -> list[str]:
    """Write the policy into a cluster's folder; return the API server's flags."""
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        # A watch is recorded as it starts, everything else as it ends.
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "Metadata", "userGroups": [f"system:serviceaccounts:{NAMESPACE}"]},
            {"level": "None"},
        ],
    }
    file = folder / "audit-policy.json"
    file.write_text(json.dumps(policy))
    return [f"--audit-policy-file={file}", f"--audit-log-path={folder / LOG}", "--audit-log-maxsize=0"]


@dataclass(frozen=True)
class Request:
    """One kind of request of one account.

    Attributes:
        account: name of the service account.
        verb: as RBAC names it.
        group: API group; empty for the core.
        resource: with its subresource behind a slash; empty for a path that is no resource.
        namespace: empty for the whole cluster.
        name: empty for lists and watches.
        code: HTTP status of the answer.
    """

    account: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    code: int


def requests(folder: Path) -> Iterator[Request]:
    """All recorded requests of a cluster, from its state folder."""
    with (folder / LOG).open() as lines:
        for line in lines:
            event = json.loads(line)
            about = event.get("objectRef") or {}
            yield Request(
                account=event["user"]["username"].removeprefix(ACCOUNT),
                verb=event["verb"],
                group=about.get("apiGroup", ""),
                resource="/".join(filter(None, (about.get("resource", ""), about.get("subresource", "")))),
                namespace=about.get("namespace", ""),
                name=about.get("name", ""),
                code=int((event.get("responseStatus") or {}).get("code", 0)),
            )
