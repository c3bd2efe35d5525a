"""What `kvshare check` reads from a cluster: pools, pods, the webhook's registration, certificate and answer.

Why this exists: everything that touches the cluster, and nothing that judges. What the user may not read is
a note, never a failure; only the pools themselves are needed.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvshare_layout.config import ConnectorConfig
from kvshare_operator.api import names
from kvshare_operator.api.pool import Spec, SpecError, read_spec
from kvshare_operator.cli.version import own_version
from kvshare_operator.core.injection.record import Record, read_record
from kvshare_operator.core.pool.members import Member, read_member
from kvshare_operator.core.quantity import MIB, bytes_of

if TYPE_CHECKING:
    from kvshare_operator.edges.cluster_api import ClusterApi

Json = dict[str, Any]
HOOK: Final = "inject.kvshare.dev"
"""Name of the webhook in the chart's MutatingWebhookConfiguration."""
_CHUNK: Final = "500"
RUNNING: Final = "status.phase!=Succeeded,status.phase!=Failed"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
_HOOKS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class CannotReadError(Exception):
    """The cluster cannot be asked at all: no answer, no credentials, or not allowed to read pools."""


class NotInstalledError(Exception):
    """The cluster answers and does not know KVSharePool."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """The webhook's answer to a dry run. ``record`` is None when no webhook touched the pod."""

    pool: tuple[str, str]
    record: Record | None


@dataclasses.dataclass(frozen=True)
class Seen:
    """Everything at one moment.

    Attributes:
        pools: raw objects.
        members: pods that opted in and are not over.
        probes: dry runs that were possible.
        certificate: PEM of the webhook's certificate; None when it could not be read.
        notes: what could not be read, as sentences.
        versions: what runs -> its version; only what could be read.
    """

    pools: tuple[Json, ...]
    members: tuple[Member, ...]
    probes: tuple[Probe, ...]
    certificate: str | None
    notes: tuple[str, ...]
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


async def read_cluster(api: ClusterApi, namespace: str | None, wanted: str | None) -> Seen:
    """Read what concerns the pools of a namespace (None: all), or one pool. Raises the two errors above."""
    errors = _error_type()
    notes: list[str] = []
    path = f"/apis/{names.API_VERSION}" + (f"/namespaces/{namespace}" if namespace else "") + f"/{names.PLURAL}"
    try:
        pools = [one for one in await list_all(api, path) if wanted in (None, (one.get("metadata") or {}).get("name"))]
    except errors as error:
        if _status(error) == 404:
            raise NotInstalledError("the cluster does not know KVSharePool: helm install kvshare") from error
        raise CannotReadError(f"pools cannot be read: {error}") from error
    members = await _members(api, namespace, pools, notes, errors)
    probes = []
    for pool in pools:
        if (probe := await _probe(api, pool, notes, errors)) is not None:
            probes.append(probe)
    configuration = await _configuration(api, notes, errors)
    certificate = await _certificate(api, configuration, notes, errors) if configuration is not None else None
    versions = await _versions(api, configuration, errors)
    return Seen(tuple(pools), tuple(members), tuple(probes), certificate, tuple(notes), versions)


def _error_type() -> type[Exception]:
    """The error type of the interface, imported only when a cluster is asked."""
    from kvshare_operator.edges.cluster_api import ApiError

    return ApiError


def _status(error: Exception) -> int:
    return int(getattr(error, "status", 0))


async def list_all(api: ClusterApi, path: str, accept: str = "application/json", **query: str) -> list[Json]:
    """Return all objects of a list, page by page. Raises ApiError."""
    found: list[Json] = []
    more = ""
    while True:
        asked = {**query, "limit": _CHUNK, **({"continue": more} if more else {})}
        page = await api.call("GET", path, query=asked, accept=accept)
        found.extend(page.get("items") or [])
        more = str((page.get("metadata") or {}).get("continue") or "")
        if not more:
            return found


async def _members(
    api: ClusterApi, namespace: str | None, pools: list[Json], notes: list[str], errors: type[Exception]
) -> list[Member]:
    path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    try:
        whole = await list_all(api, path, labelSelector=names.MEMBER)
        light = await list_all(api, path, METADATA_ONLY, fieldSelector=RUNNING)
    except errors as error:
        if _status(error) == 0:
            raise CannotReadError(f"pods cannot be read: {error}") from error
        notes.append(f"pods cannot be read: {error}")
        return []
    chosen = {_key(pool) for pool in pools}
    found: dict[str, Member] = {}
    for pod in [*whole, *light]:
        member = read_member(pod)
        if member is not None and (member.namespace, member.pool) in chosen:
            found.setdefault(member.uid or f"{member.namespace}/{member.name}", member)
    return list(found.values())


async def _probe(api: ClusterApi, pool: Json, notes: list[str], errors: type[Exception]) -> Probe | None:
    namespace, name = _key(pool)
    try:
        spec = read_spec(pool.get("spec"))
    except SpecError:
        return None
    path = f"/api/v1/namespaces/{namespace}/pods"
    try:
        answer = await api.call("POST", path, query={"dryRun": "All"}, body=probe_pod(namespace, name, spec))
    except errors as error:
        notes.append(f"dry run for pool {namespace}/{name} was not possible: {error}")
        return None
    return Probe((namespace, name), read_record((answer.get("metadata") or {}).get("annotations") or {}))


def probe_pod(namespace: str, pool: str, spec: Spec) -> Json:
    """Return a pod that fits a pool and passes the restricted pod security standard; it is never stored."""
    pipeline = 1 if 1 in spec.pipeline_parallel_sizes else spec.pipeline_parallel_sizes[0]
    arguments = [f"--tensor-parallel-size={spec.prefill.tensor_parallel_sizes[0]}"]
    if pipeline != 1:
        arguments.append(f"--pipeline-parallel-size={pipeline}")
    if spec.model.revision is not None:
        arguments.append(f"--revision={spec.model.revision}")
    if spec.cache.dtype is not None:
        arguments.append(f"--kv-cache-dtype={spec.cache.dtype}")
    ranks = spec.prefill.tensor_parallel_sizes[0] * pipeline
    needed = ranks * (bytes_of(spec.connector.staging_memory_per_rank) + ConnectorConfig.local_buffer_size)
    amounts = {"cpu": "100m", "memory": "64Mi"}
    most = {"cpu": "100m", "memory": f"{needed // MIB + 64}Mi"}
    container = {
        "name": "vllm",
        "image": "kvshare.dev/probe:dry-run",
        "command": ["vllm", "serve", spec.model.name],
        "args": arguments,
        "resources": {"requests": amounts, "limits": most},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "kvshare-check-",
            "namespace": namespace,
            "annotations": {names.POOL: pool, names.ROLE: "prefill"},
        },
        "spec": {
            "containers": [container],
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        },
    }


async def _configuration(api: ClusterApi, notes: list[str], errors: type[Exception]) -> Json | None:
    """Find the webhook's configuration, which names its Service and its Secret, and carries the chart's labels."""
    try:
        configuration = _ours(await list_all(api, _HOOKS))
    except errors as error:
        notes.append(f"the webhook's certificate cannot be read: {error}")
        return None
    if configuration is None:
        notes.append(f"no MutatingWebhookConfiguration with {HOOK} exists: no pod will be injected")
    return configuration


async def _certificate(api: ClusterApi, configuration: Json, notes: list[str], errors: type[Exception]) -> str | None:
    try:
        service = _service(configuration)
        if not service:
            notes.append("the webhook's certificate cannot be read: its configuration names no Service")
            return None
        annotations = (configuration.get("metadata") or {}).get("annotations") or {}
        name = annotations.get(names.CERTIFICATE_SECRET) or f"{service.get('name')}-certificates"
        secret = await api.call("GET", f"/api/v1/namespaces/{service.get('namespace')}/secrets/{name}")
        return base64.b64decode((secret.get("data") or {}).get("tls.crt", "")).decode() or None
    except errors as error:
        notes.append(f"the webhook's certificate cannot be read: {error}")
    except ValueError:
        notes.append("the webhook's certificate cannot be read: tls.crt is not text")
    return None


async def _versions(api: ClusterApi, configuration: Json | None, errors: type[Exception]) -> dict[str, str]:
    """Return the versions of this command, of the installed chart and of the cluster, as far as they can be read."""
    labels = ((configuration or {}).get("metadata") or {}).get("labels") or {}
    try:
        cluster = str((await api.call("GET", "/version")).get("gitVersion") or "")
    except errors:
        cluster = ""
    found = {
        "kvshare": own_version(),
        "operator": str(labels.get("app.kubernetes.io/version") or ""),
        "Kubernetes": cluster,
    }
    return {name: version for name, version in found.items() if version}


def _ours(configurations: list[Json]) -> Json | None:
    for configuration in configurations:
        if any(hook.get("name") == HOOK for hook in configuration.get("webhooks") or []):
            return configuration
    return None


def _service(configuration: Json) -> Mapping[str, Any]:
    """The Service that the API server asks; empty when it is a URL."""
    hook = next(hook for hook in configuration["webhooks"] if hook.get("name") == HOOK)
    found: Mapping[str, Any] = (hook.get("clientConfig") or {}).get("service") or {}
    return found


def _key(pool: Json) -> tuple[str, str]:
    metadata = pool.get("metadata") or {}
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))
