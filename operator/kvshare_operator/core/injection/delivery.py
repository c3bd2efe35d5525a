"""What a member gets beside its flags: the connector's code, the report endpoint's credentials, RDMA devices.

Why this exists: all of it is volumes, mounts, one init container and one variable, and all of it must leave
what the user wrote alone. Functions here change a pod that the caller has copied; they raise ConflictError
before they change anything that is taken.

The init container of ours stands last, behind the user's own. It asks for as much memory and CPU as it may
use, so a Guaranteed pod stays Guaranteed and a quota is satisfied, and it fixes no user id.
"""

from __future__ import annotations

import posixpath
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.reasons import refusal
from kvshare_operator.core.injection.conflicts import ConflictError
from kvshare_operator.core.injection.optin import OptIn
from kvshare_operator.core.injection.settings import InjectionSettings
from kvshare_operator.core.pool.view import PoolView
from kvshare_operator.core.server_version import image_volume_problem

_PAYLOAD_RESOURCES: Final = {"cpu": "100m", "memory": "64Mi"}
_PAYLOAD_SIZE_LIMIT: Final = "64Mi"
_TOKEN_SECONDS: Final = 3600
_READ_ONLY: Final = frozenset({"configMap", "secret", "downwardAPI", "projected", "image"})
"""Sources that are mounted read-only whatever volume and mount say: no folder for ours can be made below them."""

Json = dict[str, Any]


def add_payload(pod: Json, container: Json, pool: PoolView, opt_in: OptIn, settings: InjectionSettings) -> list[str]:
    """Bring the connector's code into ``container``; return warnings."""
    source = pool.spec.connector.source
    if source == "Image":
        return []
    if source == "ImageVolume":
        _add_image_volume(pod, container, pool, settings)
    else:
        _add_init_container(pod, container, pool, settings)
    secrets = [one.name for one in pool.spec.connector.image_pull_secrets or []]
    _add_pull_secrets(pod, [*secrets, *settings.image_pull_secrets])
    return _add_python_path(container, opt_in)


def _add_image_volume(pod: Json, container: Json, pool: PoolView, settings: InjectionSettings) -> None:
    if (problem := image_volume_problem(settings.server_version)) is not None:
        raise ConflictError(problem)
    image: Json = {"reference": pool.connector_image}
    if settings.image_pull_policy:
        image["pullPolicy"] = settings.image_pull_policy
    _add_volume(pod, {"name": names.PAYLOAD_VOLUME, "image": image})
    mount = {
        "name": names.PAYLOAD_VOLUME,
        "mountPath": names.PAYLOAD_PATH,
        "subPath": names.PAYLOAD_IMAGE_PATH,
        "readOnly": True,
    }
    _add_mount(pod, container, mount)


def _add_init_container(pod: Json, container: Json, pool: PoolView, settings: InjectionSettings) -> None:
    _add_volume(pod, {"name": names.PAYLOAD_VOLUME, "emptyDir": {"sizeLimit": _PAYLOAD_SIZE_LIMIT}})
    _add_mount(pod, container, {"name": names.PAYLOAD_VOLUME, "mountPath": names.PAYLOAD_PATH, "readOnly": True})
    spec = pod["spec"]
    security: Json = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if (spec.get("securityContext") or {}).get("runAsUser") != 0:
        security["runAsNonRoot"] = True
    ours: Json = {
        "name": names.PAYLOAD_CONTAINER,
        "image": pool.connector_image,
        "args": [names.PAYLOAD_PATH],
        "resources": {"requests": dict(_PAYLOAD_RESOURCES), "limits": dict(_PAYLOAD_RESOURCES)},
        "securityContext": security,
        "volumeMounts": [{"name": names.PAYLOAD_VOLUME, "mountPath": names.PAYLOAD_PATH}],
    }
    if settings.image_pull_policy:
        ours["imagePullPolicy"] = settings.image_pull_policy
    for kind in ("containers", "initContainers"):
        for present in spec.get(kind) or []:
            if present.get("name") != names.PAYLOAD_CONTAINER:
                continue
            if kind == "containers" or not _is_payload(present, ours):
                problem = f"the pod already has a container named {names.PAYLOAD_CONTAINER}"
                raise ConflictError(refusal("VolumeConflict", problem=problem))
            return
    spec.setdefault("initContainers", [])
    spec["initContainers"] = [*(spec["initContainers"] or []), ours]


def _is_payload(present: Json, ours: Json) -> bool:
    """Whether ``present`` is our init container of an earlier pass, in which other webhooks may have had a hand.

    They take images from a mirror, pin digests, and set resources and security contexts: a copy all the same.
    """
    return (
        not present.get("command")
        and present.get("args") == ours["args"]
        and same_image(str(present.get("image")), ours["image"])
        and any(_covers(one, ours["volumeMounts"][0]) for one in present.get("volumeMounts") or [])
    )


def same_image(present: str, wanted: str) -> bool:
    """Whether two references name one image: digests decide, else name and tag, wherever the registry is."""
    (name, digest), (wanted_name, wanted_digest) = _name_and_digest(present), _name_and_digest(wanted)
    return digest == wanted_digest if digest and wanted_digest else name == wanted_name


def _name_and_digest(reference: str) -> tuple[str, str]:
    named, _, digest = reference.partition("@")
    return named.rsplit("/", 1)[-1], digest


def _add_python_path(container: Json, opt_in: OptIn) -> list[str]:
    """Put our folder first on PYTHONPATH, in front of the user's own value or the one of the image.

    Of several entries the last one counts, as for the kubelet.
    """
    name = str(container.get("name"))
    for entry in reversed(container.get("env") or []):
        if entry.get("name") != "PYTHONPATH":
            continue
        if entry.get("valueFrom") is not None:
            problem = " by reference, and KVShare must stand in it"
            raise ConflictError(refusal("EnvConflict", container=name, variable="PYTHONPATH", problem=problem))
        value = str(entry.get("value") or "")
        if names.PAYLOAD_PATH not in value.split(":"):
            entry["value"] = f"{names.PAYLOAD_PATH}:{value}" if value else names.PAYLOAD_PATH
        return []
    behind = opt_in.image_pythonpath
    _add_env(container, "PYTHONPATH", f"{names.PAYLOAD_PATH}:{behind}" if behind else names.PAYLOAD_PATH)
    if behind:
        return []
    return [
        f"PYTHONPATH is set to {names.PAYLOAD_PATH}: if the image sets its own, name it in the annotation "
        f"{names.IMAGE_PYTHONPATH}"
    ]


def add_report_access(pod: Json, container: Json, settings: InjectionSettings) -> None:
    """Mount the token and the CA with which a member reports. Nothing without a report endpoint."""
    if not settings.report_url:
        return
    token = {"audience": names.TOKEN_AUDIENCE, "expirationSeconds": _TOKEN_SECONDS, "path": "token"}
    annotation = {"fieldPath": f"metadata.annotations['{names.REPORT_CA}']"}
    sources = [
        {"serviceAccountToken": token},
        {"downwardAPI": {"items": [{"path": "ca.crt", "fieldRef": annotation}]}},
    ]
    _add_volume(pod, {"name": names.REPORT_VOLUME, "projected": {"sources": sources}})
    _add_mount(pod, container, {"name": names.REPORT_VOLUME, "mountPath": names.REPORT_PATH, "readOnly": True})


def add_rdma(container: Json, pool: PoolView) -> None:
    """Request the device resource and IPC_LOCK, only when `store.rdma` asks for them."""
    rdma = pool.spec.store.rdma
    if rdma is None:
        return
    resources = container["resources"] = dict(container.get("resources") or {})
    kinds = ("limits", "requests")
    # A pod's own number wins; the API server wants both to be the same.
    own = next((v for kind in kinds if (v := (resources.get(kind) or {}).get(rdma.resource_name)) is not None), None)
    for kind in kinds:
        amounts = resources[kind] = dict(resources.get(kind) or {})
        amounts.setdefault(rdma.resource_name, str(rdma.resource_count) if own is None else own)
    if rdma.ipc_lock == "Enabled":
        security = container["securityContext"] = dict(container.get("securityContext") or {})
        capabilities = security["capabilities"] = dict(security.get("capabilities") or {})
        added = capabilities.get("add") or []
        if "IPC_LOCK" not in added:
            capabilities["add"] = [*added, "IPC_LOCK"]


def add_variable(container: Json, value: str) -> None:
    """Set our variable for scripts. Raises ConflictError when the user gave it another value."""
    present = [entry for entry in container.get("env") or [] if entry.get("name") == names.ARGS_VARIABLE]
    if present:
        for entry in present:
            if entry.get("valueFrom") is not None or str(entry.get("value") or "") != value:
                problem = ", which KVShare fills"
                raise ConflictError(
                    refusal(
                        "EnvConflict",
                        container=str(container.get("name")),
                        variable=names.ARGS_VARIABLE,
                        problem=problem,
                    )
                )
        return
    _add_env(container, names.ARGS_VARIABLE, value)


def _add_env(container: Json, name: str, value: str) -> None:
    container["env"] = [*(container.get("env") or []), {"name": name, "value": value}]


def _add_pull_secrets(pod: Json, wanted: list[str]) -> None:
    present = list(pod["spec"].get("imagePullSecrets") or [])
    known = {one.get("name") for one in present}
    for name in dict.fromkeys(wanted):
        if name not in known:
            present.append({"name": name})
    if present:
        pod["spec"]["imagePullSecrets"] = present


def _add_volume(pod: Json, volume: Json) -> None:
    present = pod["spec"].get("volumes") or []
    for one in present:
        if one.get("name") == volume["name"]:
            if not _is_volume(one, volume):
                problem = f"the pod already has a volume named {volume['name']} with another source"
                raise ConflictError(refusal("VolumeConflict", problem=problem))
            return
    pod["spec"]["volumes"] = [*present, volume]


def _is_volume(present: Json, ours: Json) -> bool:
    image = ours.get("image")
    if image is None:
        return _covers(present, ours)
    source = present.get("image")
    return isinstance(source, dict) and same_image(str(source.get("reference")), image["reference"])


def _add_mount(pod: Json, container: Json, mount: Json) -> None:
    read_only = {one.get("name") for one in pod["spec"].get("volumes") or [] if _is_read_only(one)}
    present = container.get("volumeMounts") or []
    ours = _real(mount["mountPath"])
    for one in present:
        if _covers(one, mount):
            return
        theirs = _real(str(one.get("mountPath", "")))
        covered = theirs != "/" and ours.startswith(f"{theirs}/")
        fixed = one.get("readOnly") or one.get("name") in read_only
        hidden = covered and (one.get("subPath") or one.get("subPathExpr") or fixed)
        if theirs == ours or theirs.startswith(f"{ours}/") or hidden:
            problem = (
                f"container {container.get('name')!r} mounts volume {one.get('name')!r} at "
                f"{one.get('mountPath')}, which KVShare needs at {mount['mountPath']}"
            )
            raise ConflictError(refusal("VolumeConflict", problem=problem))
    container["volumeMounts"] = [*present, mount]


def _is_read_only(volume: Json) -> bool:
    """Whether a volume is read-only by itself, such as a claim with `readOnly: true`."""
    sources = [source for source in volume.values() if isinstance(source, dict)]
    return not _READ_ONLY.isdisjoint(volume) or any(source.get("readOnly") for source in sources)


def _real(path: str) -> str:
    """Normalise a mount path; /var/run is a link to /run in most images."""
    path = posixpath.normpath(path)
    return path.removeprefix("/var") if path.startswith("/var/run/") or path == "/var/run" else path


def _covers(present: Any, wanted: Any) -> bool:
    """Whether ``present`` says everything that ``wanted`` says; the API server adds defaults of its own."""
    if isinstance(wanted, dict):
        return isinstance(present, dict) and all(
            key in present and _covers(present[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(present, list)
            and len(present) >= len(wanted)
            and all(_covers(a, b) for a, b in zip(present, wanted, strict=False))
        )
    return bool(present == wanted)
