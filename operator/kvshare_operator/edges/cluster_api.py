"""The one narrow door to the API server: JSON in, JSON out, errors as one type.

Why this exists: edges need few calls (get, list, patch, create). One small interface lets tests use an
in-memory API (``memory_api``) and maps every foreign error in one place. Behind it is the Kubernetes client
library: credentials, token renewal, TLS and proxies are its business.
"""

from __future__ import annotations

import json
import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import Any, Final, Protocol

import aiohttp
from kubernetes.aio import client, config

Json = dict[str, Any]

APPLY: Final = "application/apply-patch+yaml"
STRATEGIC: Final = "application/strategic-merge-patch+json"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
#: Logs come as text; a server that is asked for nothing but text refuses (406), since its errors are objects.
TEXT: Final = "text/plain, */*"
_OWN_NAMESPACE: Final = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, connect=5)


class ApiError(Exception):
    """The API server said no, or could not be reached.

    Attributes:
        status: HTTP status; 0 when there was no answer at all.
        retry: True when the same call may succeed later.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.retry = status in (0, 409, 429) or status >= 500
        super().__init__(f"{status}: {message}" if status else message)


class ClusterApi(Protocol):
    """What edges may ask of a cluster."""

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Json:
        """Make one call; return the decoded answer, with ``accept=TEXT`` as ``{"text": ...}``. Raises ApiError."""
        ...


class HttpClusterApi:
    """The API server over HTTPS, through the Kubernetes client, with the credentials of the pod or of KUBECONFIG.

    The client library renews projected tokens, runs credential plugins and knows proxies.
    """

    def __init__(self) -> None:
        self._client: client.ApiClient | None = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Json:
        """Make one call; return the decoded answer. Raises ApiError."""
        api = await self._connected()
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": "kvshare-operator"}
        url = api.configuration.host + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        try:
            await api.update_params_for_auth(headers, None, ["BearerToken"], path, method, body)
            response = await api.call_api(method, url, headers, body, _request_timeout=_TIMEOUT)
            text = (await response.read()).decode(errors="replace")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(0, f"{method} {path}: {type(error).__name__} {error}") from error
        if response.status >= 400:
            raise ApiError(response.status, _message(text))
        if accept == TEXT:
            return {"text": text}
        try:
            found = json.loads(text) if text else {}
        except ValueError as error:
            raise ApiError(0, f"{method} {path}: the answer is not JSON") from error
        return found if isinstance(found, dict) else {"items": found}

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _connected(self) -> client.ApiClient:
        if self._client is None:
            configuration = client.Configuration()
            try:
                try:
                    config.load_incluster_config(client_configuration=configuration)
                except config.ConfigException:
                    await config.load_kube_config(client_configuration=configuration)
            except (config.ConfigException, OSError) as error:
                raise ApiError(
                    0, f"no credentials: neither a service account nor KUBECONFIG was found ({error})"
                ) from error
            self._client = client.ApiClient(configuration)
        return self._client


def context_namespace() -> str:
    """Return the namespace that a person works in: the current context's, the pod's own, or `default`."""
    try:
        _, active = config.list_kube_config_contexts()
        return str((active.get("context") or {}).get("namespace") or "default")
    except (config.ConfigException, OSError, TypeError):
        try:
            return _OWN_NAMESPACE.read_text().strip() or "default"
        except OSError:
            return "default"


def _message(text: str) -> str:
    try:
        return str(json.loads(text).get("message", text))[:500]
    except (ValueError, AttributeError):
        return text[:500]
