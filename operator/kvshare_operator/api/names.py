"""Every name that the operator puts on, or reads from, a Kubernetes object.

Why this exists: labels, annotations and condition types are an API; a name written twice is a name that
will differ one day. Only constants may live here, each with who writes it and what it means.
"""

from __future__ import annotations

from typing import Final

GROUP: Final = "kvshare.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "KVSharePool"
PLURAL: Final = "kvsharepools"
SINGULAR: Final = "kvsharepool"
SHORT_NAME: Final = "kvsp"

# -- annotations that users write on pods -----------------------------------------------------------

POOL: Final = "kvshare.dev/pool"
"""Opt-in: the name of a pool in the pod's own namespace."""
ROLE: Final = "kvshare.dev/role"
"""prefill, decode or both (default)."""
CONTAINER: Final = "kvshare.dev/container"
"""Which container runs vLLM, when several could."""
TENSOR_PARALLEL_SIZE: Final = "kvshare.dev/tensor-parallel-size"
"""The tensor-parallel size, when the command line does not show it."""
ENTRYPOINT: Final = "kvshare.dev/entrypoint"
"""`forwards-args`: the image's ENTRYPOINT passes its arguments to vLLM."""
IMAGE_PYTHONPATH: Final = "kvshare.dev/image-pythonpath"
"""The image's own PYTHONPATH; it is joined behind ours."""
NETWORK_DEVICES: Final = "kvshare.dev/network-devices"
"""RDMA devices of this pod, with `store.protocol: RDMA`: `auto` (default, by topology for each rank), a list for all
ranks (`mlx5_0,mlx5_1`), or one list for each rank, separated by slashes (`mlx5_0/mlx5_1`)."""

# -- annotations and labels that the webhook writes -------------------------------------------------

INJECTED: Final = "kvshare.dev/injected"
"""The record: JSON with what was injected, or with the reason why nothing was."""
REPORT_CA: Final = "kvshare.dev/report-ca"
"""CA of the report endpoint (PEM); the pod mounts it through the downward API."""
MEMBER: Final = "kvshare.dev/member"
"""Label with the pool's name on injected pods, so that the controller watches members only."""

# -- on objects of managed stores -------------------------------------------------------------------

STORE: Final = "kvshare.dev/store"
"""Label with the pool's name on everything of its managed store."""
APPLIED: Final = "kvshare.dev/applied"
"""Annotation: digest of what the controller applied, so that it notices what it no longer wants."""

# -- on the webhook configuration -------------------------------------------------------------------

CERTIFICATE_SECRET: Final = "kvshare.dev/certificate-secret"
"""Annotation that the chart writes: the Secret with the served certificate, in the webhook's namespace."""

# -- pod conditions that the operator writes --------------------------------------------------------

SHARED: Final = "kvshare.dev/Shared"
"""What the member reported: True (shares), False with a reason; of several engines in the pod the worst."""
REPORT: Final = "kvshare.dev/Report"
"""The report itself as compact JSON in the message: fingerprint, layouts, Store TP, manifest.
Further data-parallel engines of the pod have `kvshare.dev/Report-1` and so on."""

# -- pool conditions --------------------------------------------------------------------------------

ACCEPTED: Final = "Accepted"
STORE_TP_RESOLVED: Final = "StoreTPResolved"
STORE_REACHABLE: Final = "StoreReachable"
MEMBERS_CONSISTENT: Final = "MembersConsistent"
READY: Final = "Ready"

# -- inside injected pods ---------------------------------------------------------------------------

PAYLOAD_VOLUME: Final = "kvshare-payload"
PAYLOAD_PATH: Final = "/opt/kvshare"
PAYLOAD_CONTAINER: Final = "kvshare-payload"
PAYLOAD_IMAGE_PATH: Final = "kvshare/python"
"""Where the payload image keeps the Python packages, relative to its root."""
REPORT_VOLUME: Final = "kvshare-report"
REPORT_PATH: Final = "/var/run/kvshare"
REPORT_TOKEN_FILE: Final = f"{REPORT_PATH}/token"
REPORT_CA_FILE: Final = f"{REPORT_PATH}/ca.crt"
TOKEN_AUDIENCE: Final = GROUP
ARGS_VARIABLE: Final = "KVSHARE_VLLM_ARGS"
"""Environment variable with our flags, for shell scripts whose author references it unquoted."""

CONTROLLER_MANAGER: Final = "kvshare-controller"
"""Field manager of everything the controller applies."""
WEBHOOK_MANAGER: Final = "kvshare-webhook"
"""Field manager of the pod conditions that the webhook's report endpoint writes."""
