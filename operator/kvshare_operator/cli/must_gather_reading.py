"""What `kvshare must-gather` reads from a cluster, as files of an archive: everything masked, nothing judged.

Why this exists: support needs the same things every time. What may not be read is noted in the archive and is no
failure. Secrets are not gathered, and of engines' logs only lines about KVShare: prompts have no business here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, Final

import yaml

from kvshare_operator.api import names
from kvshare_operator.cli.check_reading import METADATA_ONLY, RUNNING
from kvshare_operator.cli.masking import masked, masked_text
from kvshare_operator.edges.cluster_api import TEXT, ApiError

if TYPE_CHECKING:
    from kvshare_operator.edges.cluster_api import ClusterApi

Json = dict[str, Any]
_HOOKS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_CRD: Final = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.PLURAL}.{names.GROUP}"
_CHART: Final = "app.kubernetes.io/name=kvshare"
#: vLLM's log names the file that speaks, not its package: `[membership.py:108] verdict: shared`.
_OUR_FILES: Final = (
    "choice", "client", "connector", "engine_facts", "glue", "lines", "loading", "membership", "mooncake", "probe",
    "reporter", "saving",
)  # fmt: skip
_ABOUT_US: Final = re.compile(
    rf"kvshare|mooncake|kv_connector|kv_transfer|\[(?:{'|'.join(_OUR_FILES)})\.py:\d+\]", re.IGNORECASE
)
_MOST_LEFT_OUT: Final = 20
_DENIED: Final = '"inject.kvshare.dev" denied the request'
"""In an event of a ReplicaSet or the like: a pod of it was refused, and there is no pod to look at."""
_OBJECTS_OF_STORES: Final = (
    "/apis/apps/v1/{}/deployments",
    "/apis/apps/v1/{}/statefulsets",
    "/api/v1/{}/services",
    "/apis/policy/v1/{}/poddisruptionbudgets",
    "/apis/networking.k8s.io/v1/{}/networkpolicies",
    "/api/v1/{}/pods",
)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to gather.

    Attributes:
        namespace: of the pools; None for all.
        pool: one pool only; None for all.
        operator_namespace: where controller and webhook run; empty asks the webhook's configuration.
        log_lines: last lines of each container's log.
    """

    namespace: str | None
    pool: str | None
    operator_namespace: str
    log_lines: int


class Gathering:
    """One gathering: files by name, and what could not be read."""

    def __init__(self, api: ClusterApi, wanted: Wanted) -> None:
        self._api, self._wanted = api, wanted
        self.files: dict[str, str] = {}
        self.missing: list[str] = []

    async def everything(self) -> None:
        """Read all there is. Raises ApiError only when no cluster answers at all."""
        version = await self._api.call("GET", "/version")
        self._add("cluster-version.json", json.dumps(version, indent=2))
        await self._definition()
        configurations = await self._list("webhook configuration", _HOOKS)
        ours = [one for one in configurations if _service_of(one)]
        self._objects("webhook/configuration.yaml", ours)
        home = self._wanted.operator_namespace or next((str(_service_of(one)) for one in ours), "kvshare-system")
        await self._operator(home)
        await self._pools()

    async def _definition(self) -> None:
        try:
            found = await self._api.call("GET", _CRD)
        except ApiError as error:
            self.missing.append(f"definition of the resource: {error}")
            return
        served = [one.get("name") for one in (found.get("spec") or {}).get("versions") or []]
        summary = {
            "metadata": found.get("metadata"),
            "versions": served,
            "conditions": (found.get("status") or {}).get("conditions"),
        }
        self._objects("resource-definition.yaml", [summary])

    async def _operator(self, home: str) -> None:
        path = f"/apis/apps/v1/namespaces/{home}/deployments"
        self._objects("operator/deployments.yaml", await self._list("operator", path, labelSelector=_CHART))
        pods = await self._list("operator's pods", f"/api/v1/namespaces/{home}/pods", labelSelector=_CHART)
        self._objects("operator/pods.yaml", pods)
        for pod in pods:
            await self._logs("operator", pod, whole=True)
        await self._events(home, "operator/events.yaml", {str((pod.get("metadata") or {}).get("name")) for pod in pods})

    async def _pools(self) -> None:
        where = f"namespaces/{self._wanted.namespace}/" if self._wanted.namespace else ""
        pools = await self._list("pools", f"/apis/{names.API_VERSION}/{where}{names.PLURAL}")
        for pool in pools:
            metadata = pool.get("metadata") or {}
            namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
            if self._wanted.pool not in (None, name):
                continue
            folder = f"pools/{namespace}/{name}"
            self._objects(f"{folder}/pool.yaml", [pool])
            members = await self._list(
                f"members of {namespace}/{name}",
                f"/api/v1/namespaces/{namespace}/pods",
                labelSelector=f"{names.MEMBER}={name}",
            )
            self._objects(f"{folder}/members.yaml", members)
            left_out = await self._left_out(namespace, name)
            self._objects(f"{folder}/not-injected.yaml", left_out)
            for pod in members:
                await self._logs(folder, pod, whole=False)
            stores = await self._store(namespace, name)
            self._objects(f"{folder}/store.yaml", stores)
            about = {name, *(str((one.get("metadata") or {}).get("name")) for one in (*members, *left_out, *stores))}
            await self._events(namespace, f"{folder}/events.yaml", about)

    async def _left_out(self, namespace: str, pool: str) -> list[Json]:
        """Pods that asked for the pool and were not injected: they have the annotation and not the label."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        known = await self._list(f"pods of {namespace}", path, accept=METADATA_ONLY, fieldSelector=RUNNING)
        asked = [
            str(metadata.get("name"))
            for one in known
            if ((metadata := one.get("metadata") or {}).get("annotations") or {}).get(names.POOL) == pool
            and names.MEMBER not in (metadata.get("labels") or {})
        ]
        if len(asked) > _MOST_LEFT_OUT:
            self.missing.append(f"{len(asked) - _MOST_LEFT_OUT} of {len(asked)} pods of {pool} that were not injected")
        found = []
        for name in asked[:_MOST_LEFT_OUT]:
            try:
                found.append(await self._api.call("GET", f"{path}/{name}"))
            except ApiError as error:
                self.missing.append(f"pod {namespace}/{name}: {error}")
        return found

    async def _store(self, namespace: str, pool: str) -> list[Json]:
        found: list[Json] = []
        for path in _OBJECTS_OF_STORES:
            where = path.format(f"namespaces/{namespace}")
            selector = f"{names.STORE}={pool}"
            kind = path.rsplit("/", 1)[1]
            found.extend(await self._list(f"store's {kind} of {namespace}/{pool}", where, labelSelector=selector))
        return found

    async def _logs(self, folder: str, pod: Json, *, whole: bool) -> None:
        metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
        name = str(metadata.get("name"))
        base = f"/api/v1/namespaces/{metadata.get('namespace')}/pods/{name}/log"
        restarted = {
            str(one.get("name"))
            for kind in ("containerStatuses", "initContainerStatuses")
            for one in (pod.get("status") or {}).get(kind) or []
            if int(one.get("restartCount") or 0)
        }
        ours = [one for one in spec.get("initContainers") or [] if one.get("name") == names.PAYLOAD_CONTAINER]
        for container in [*(spec.get("containers") or []), *ours]:
            which = str(container.get("name"))
            for previous in (False, True) if which in restarted else (False,):
                query = {"container": which, "tailLines": str(self._wanted.log_lines), "timestamps": "true"}
                if previous:
                    query["previous"] = "true"
                ending = ".previous.log" if previous else ".log"
                try:
                    answer = await self._api.call("GET", base, query=query, accept=TEXT)
                except ApiError as error:
                    self.missing.append(f"log of {metadata.get('namespace')}/{name}, container {which}: {error}")
                    continue
                lines = str(answer.get("text", "")).splitlines()
                kept = lines if whole else [line for line in lines if _ABOUT_US.search(line)]
                self._add(f"{folder}/logs/{name}.{which}{ending}", "\n".join(masked_text(line) for line in kept) + "\n")

    async def _events(self, namespace: str, file: str, about: set[str]) -> None:
        events = await self._list(f"events of {namespace}", f"/api/v1/namespaces/{namespace}/events")
        about = {name for name in about if name not in ("", "None")}
        owners = tuple(about)
        kept = [
            one for one in events
            if (found := str((one.get("involvedObject") or {}).get("name"))) in about
            or found.startswith(owners)
            or _DENIED in str(one.get("message"))
        ]  # fmt: skip
        self._objects(file, kept)

    async def _list(self, what: str, path: str, accept: str = "application/json", **query: str) -> list[Json]:
        found: list[Json] = []
        more = ""
        while True:
            asked = {**query, "limit": "500", **({"continue": more} if more else {})}
            try:
                page = await self._api.call("GET", path, query=asked, accept=accept)
            except ApiError as error:
                self.missing.append(f"{what}: {error}")
                return found
            found.extend(page.get("items") or [])
            more = str((page.get("metadata") or {}).get("continue") or "")
            if not more:
                return found

    def _objects(self, file: str, objects: list[Json]) -> None:
        if objects:
            self._add(file, yaml.safe_dump_all([masked(one) for one in objects], sort_keys=False, allow_unicode=True))

    def _add(self, file: str, text: str) -> None:
        self.files[file] = text


def _service_of(configuration: Json) -> str | None:
    """Return the namespace of our webhook's Service; None for somebody else's configuration."""
    for hook in configuration.get("webhooks") or []:
        if hook.get("name") == "inject.kvshare.dev":
            return str(((hook.get("clientConfig") or {}).get("service") or {}).get("namespace") or "kvshare-system")
    return None
