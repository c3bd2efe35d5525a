"""What the operator's own settings decide about managed stores."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """Settings of all managed stores.

    Attributes:
        operator_namespace: where the controller runs; only it may reach a master beside members.
        image: image with Mooncake's programs where a pool names none; empty: every pool must name one.
        pull_policy: its pull policy; empty leaves it to Kubernetes.
        pull_secrets: names of Secrets in the pools' namespaces.
        run_as_user: user id of the store's pods; 0 leaves it to the image or the platform.
    """

    operator_namespace: str = "kvshare-system"
    image: str = ""
    pull_policy: str = ""
    pull_secrets: tuple[str, ...] = ()
    run_as_user: int = 65532
