"""Pods and pools of the operator's tests: the base pod P0, pool p1, and small ways to change them."""

from __future__ import annotations

import copy
from typing import Any

from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal
from kvshare_operator.core.injection.inject import Injected, inject
from kvshare_operator.core.injection.settings import InjectionSettings
from kvshare_operator.core.pool.view import view

Json = dict[str, Any]
PAYLOAD = "example.org/kvshare-connector:1"
CA = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
SETTINGS = InjectionSettings(
    connector_image=PAYLOAD,
    report_url="https://kvshare-webhook.kvshare-system.svc:9444/v1/report",
    report_ca=CA,
    server_version=(1, 36),
)
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def pod_p0(**container: Any) -> Json:
    """The base pod; keyword arguments replace fields of its container, None removes one."""
    fields: Json = {
        "name": "vllm",
        "image": "example.org/vllm:1",
        "command": ["vllm", "serve", "org/m"],
        "args": ["--tensor-parallel-size", "2"],
        "resources": {
            "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"},
            "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
        },
        **container,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p0", "namespace": "ns-a", "annotations": {names.POOL: "p1"}},
        "spec": {"containers": [{key: value for key, value in fields.items() if value is not None}]},
    }


def annotated(pod: Json, **annotations: str) -> Json:
    """The same pod with more annotations; names are given as `role` for `kvshare.dev/role`."""
    changed = copy.deepcopy(pod)
    for name, value in annotations.items():
        changed["metadata"]["annotations"][f"kvshare.dev/{name.replace('_', '-')}"] = value
    return changed


def script_pod(script: str, *words: str, shell: str = "bash", **container: Any) -> Json:
    """A pod whose container runs a shell script."""
    return pod_p0(command=[f"/bin/{shell}", "-c"], args=[script, *words], **container)


def pool_p1(**spec: Any) -> Json:
    """Pool p1; keyword arguments replace fields of its spec, None removes one."""
    fields: Json = {
        "model": {"name": "org/m", "kvHeads": 8},
        "prefill": {"tensorParallelSizes": [4, 2]},
        "decode": {"tensorParallelSizes": [2]},
        "store": {"type": "External", "external": {"masterAddress": "mooncake-master.ns-a.svc:50051"}},
        **spec,
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "p1", "namespace": "ns-a", "generation": 1, "uid": "pool-uid"},
        "spec": {key: value for key, value in fields.items() if value is not None},
    }


def run(pod: Json, pool: Json | None = None, settings: InjectionSettings = SETTINGS) -> Injected | Refusal:
    """Inject a pool into a pod."""
    return inject(pod, view(pool or pool_p1(), settings.connector_image), settings)


def injected(pod: Json, pool: Json | None = None, settings: InjectionSettings = SETTINGS) -> Injected:
    """Inject, and fail with the refusal's own words if it was refused."""
    outcome = run(pod, pool, settings)
    assert isinstance(outcome, Injected), outcome.sentence()
    return outcome


def refused(pod: Json, pool: Json | None = None, settings: InjectionSettings = SETTINGS) -> Refusal:
    """Inject, and fail if it was not refused."""
    outcome = run(pod, pool, settings)
    assert isinstance(outcome, Refusal), "the pod was injected"
    return outcome


def engine_of(outcome: Injected, name: str = "vllm") -> Json:
    """The engine's container after injection."""
    found: Json = next(one for one in outcome.pod["spec"]["containers"] if one["name"] == name)
    return found


def flags_of(container: Json) -> list[str]:
    """The flags of ours that stand in `args`."""
    return [word for word in container.get("args") or [] if str(word).startswith("--kv-transfer-config.")]


def variables(container: Json) -> dict[str, Any]:
    """Environment variables with literal values."""
    return {entry["name"]: entry.get("value") for entry in container.get("env") or []}
