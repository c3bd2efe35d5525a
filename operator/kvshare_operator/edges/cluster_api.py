"""The one narrow door to the API server: JSON in, JSON out, errors as one type.

Why this exists: edges need few calls (get, list, patch, create). One small interface lets tests use an
in-memory API (``memory_api``) and maps every foreign error in one place. Credentials come from where kopf
finds its own.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import aiohttp
import kopf

log = logging.getLogger("kvshare.api")
Json = dict[str, Any]

APPLY: Final = "application/apply-patch+yaml"
STRATEGIC: Final = "application/strategic-merge-patch+json"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, connect=5)
_CREDENTIAL_SECONDS: Final = 60
"""Projected tokens are renewed on disk; they are read again after this time."""


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
        """Make one call; return the decoded answer. Raises ApiError."""
        ...


class HttpClusterApi:
    """The API server over HTTPS, with the credentials of the pod or of KUBECONFIG."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._info: kopf.ConnectionInfo | None = None
        self._ssl: ssl.SSLContext | None = None
        self._read_at = 0.0
        self._settings = kopf.OperatorSettings()

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
        info, context = self._credentials()
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        headers = {**info.as_http_headers(), "Accept": accept, "User-Agent": "kvshare-operator"}
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = json.dumps(body)
        try:
            async with self._session.request(
                method, info.server + path, params=query, data=data, headers=headers, ssl=context
            ) as response:
                text = await response.text()
                if response.status >= 400:
                    raise ApiError(response.status, _message(text))
                found = json.loads(text) if text else {}
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(0, f"{method} {path}: {type(error).__name__} {error}") from error
        except ValueError as error:
            raise ApiError(0, f"{method} {path}: the answer is not JSON") from error
        return found if isinstance(found, dict) else {"items": found}

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _login(self) -> kopf.ConnectionInfo:
        found = kopf.login_with_service_account(logger=log, settings=self._settings)
        if found is None and (os.environ.get("KUBECONFIG") or os.path.exists(os.path.expanduser("~/.kube/config"))):
            found = kopf.login_with_kubeconfig(logger=log, settings=self._settings)
        if found is None:
            raise ApiError(0, "no credentials: neither a service account nor KUBECONFIG was found")
        return found

    def _credentials(self) -> tuple[kopf.ConnectionInfo, ssl.SSLContext]:
        if self._info is None or self._ssl is None or time.monotonic() - self._read_at > _CREDENTIAL_SECONDS:
            info = self._login()
            if self._info is None or info.ca_data != self._info.ca_data or self._ssl is None:
                self._ssl = info.as_ssl_context()
            self._info, self._read_at = info, time.monotonic()
        return self._info, self._ssl


def _message(text: str) -> str:
    try:
        return str(json.loads(text).get("message", text))[:500]
    except (ValueError, AttributeError):
        return text[:500]
