"""The parts that all pods of a managed store have in common: security, metadata, pull secrets, writable folders.

Everything passes the *restricted* pod security standard, except the capability that RDMA asks for.
"""

from __future__ import annotations

from typing import Any

from kvshare_operator.core.quantity import as_quantity
from kvshare_operator.core.store import identity
from kvshare_operator.core.store.identity import Component
from kvshare_operator.core.store.plan import StorePlan

Json = dict[str, Any]


def metadata(plan: StorePlan, component: Component, suffix: str = "") -> Json:
    """Return the metadata of one object of the store."""
    return {
        "name": identity.store_name(plan.pool, component) + suffix,
        "namespace": plan.namespace,
        "labels": identity.labels(plan.pool, component),
        "ownerReferences": [identity.owner(plan.pool, plan.uid)],
    }


def workload(plan: StorePlan, kind: str, component: Component, replicas: int, template: Json, **more: Any) -> Json:
    """Return a Deployment or StatefulSet around a pod template; ``more`` enters its spec."""
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": metadata(plan, component),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": identity.selector(plan.pool, component)},
            "template": template,
            **more,
        },
    }


def service(plan: StorePlan, component: Component, port: tuple[str, int], **more: Any) -> Json:
    """Return a Service in front of a component's pods, with one port by name and number; ``more`` enters its spec."""
    name, number = port
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, component),
        "spec": {
            "selector": identity.selector(plan.pool, component),
            "ports": [{"name": name, "port": number, "targetPort": name, "protocol": "TCP"}],
            **more,
        },
    }


def pod_template(plan: StorePlan, component: Component, container: Json, seconds: int, **more: Any) -> Json:
    """Return a pod template with one container; ``seconds`` is the grace period, ``more`` enters the pod spec."""
    security: Json = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if plan.run_as_user:
        security["runAsUser"] = plan.run_as_user
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": seconds,
        "securityContext": security,
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "64Mi"}}],
        **more,
    }
    if plan.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in plan.pull_secrets]
    return {"metadata": {"labels": identity.labels(plan.pool, component)}, "spec": spec}


def container(plan: StorePlan, name: str, cpu: str, memory: tuple[int, int], **more: Any) -> Json:
    """Return a container that may write to /tmp only; ``memory`` is request and limit in bytes, whole MiB."""
    request, limit = map(as_quantity, memory)
    made: Json = {
        "name": name,
        "image": plan.image,
        "resources": {"requests": {"cpu": cpu, "memory": request}, "limits": {"memory": limit}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
        **more,
    }
    if plan.pull_policy:
        made["imagePullPolicy"] = plan.pull_policy
    return made


def own_address() -> Json:
    """Return the variable with the pod's own address."""
    return {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
