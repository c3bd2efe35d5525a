"""Self-managed certificates: the Secret that webhooks mount, and the caBundle that the API server trusts.

Why this exists: the controller issues and renews (``core.certificates`` says when); webhooks only read files. Where
somebody else does, no controller needs this, nor the permissions for it.
The bundle reaches the API server before a certificate of a new CA can reach a webhook, so that reviews never
meet a CA they do not know.
"""

from __future__ import annotations

import base64
import datetime
import logging
from typing import Any

from kvshare_operator.api import names
from kvshare_operator.core import certificates
from kvshare_operator.edges.cluster_api import APPLY, ApiError, ClusterApi
from kvshare_operator.settings import Settings

log = logging.getLogger("kvshare.certificates")
Json = dict[str, Any]


def certificate_keeper(api: ClusterApi, settings: Settings) -> CertificateKeeper | None:
    """Return what keeps the certificates; None where cert-manager or the user does."""
    return CertificateKeeper(api, settings) if settings.certificate_mode == "SelfManaged" else None


class CertificateKeeper:
    """Keeps Secret and webhook configuration as they should be; writes only what differs."""

    def __init__(self, api: ClusterApi, settings: Settings) -> None:
        self.api, self.settings = api, settings
        self._secret = f"/api/v1/namespaces/{settings.namespace}/secrets/{settings.certificate_secret}"
        self._configuration = (
            f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{settings.webhook_configuration}"
        )

    async def keep(self) -> None:
        """Look at both once, and mend them. Raises ApiError."""
        now = datetime.datetime.now(datetime.UTC)
        material = certificates.read_material(await self._read())
        renewal = certificates.renewed(material, self.settings.dns_names, now)
        if renewal is not None:
            material, why = renewal
            await self._trust(material.bundle)
            await self._write(material)
            log.info("certificates renewed: %s", why)
        elif material is not None:
            await self._trust(material.bundle)

    async def _read(self) -> dict[str, str]:
        try:
            secret = await self.api.call("GET", self._secret)
        except ApiError as error:
            if error.status == 404:
                return {}
            raise
        found = {}
        for key, value in (secret.get("data") or {}).items():
            try:
                found[key] = base64.b64decode(value).decode()
            except ValueError:
                log.warning("key %s of Secret %s is not text", key, self.settings.certificate_secret)
        return found

    async def _write(self, material: certificates.Material) -> None:
        data = {key: base64.b64encode(text.encode()).decode() for key, text in material.to_data().items()}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "namespace": self.settings.namespace,
                "name": self.settings.certificate_secret,
                "labels": {"app.kubernetes.io/managed-by": names.CONTROLLER_MANAGER},
            },
            "type": "Opaque",
            "data": data,
        }
        query = {"fieldManager": names.CONTROLLER_MANAGER, "force": "true"}
        await self.api.call("PATCH", self._secret, query=query, body=body, content_type=APPLY)

    async def _trust(self, bundle: str) -> None:
        """Have every webhook of our configuration trust ``bundle``; a missing configuration is not ours to make."""
        wanted = base64.b64encode(bundle.encode()).decode()
        try:
            present = await self.api.call("GET", self._configuration)
        except ApiError as error:
            if error.status == 404:
                log.warning("webhook configuration %s does not exist", self.settings.webhook_configuration)
                return
            raise
        hooks = present.get("webhooks") or []
        if all((hook.get("clientConfig") or {}).get("caBundle") == wanted for hook in hooks):
            return
        body = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": self.settings.webhook_configuration},
            "webhooks": [{"name": hook["name"], "clientConfig": {"caBundle": wanted}} for hook in hooks],
        }
        query = {"fieldManager": names.CONTROLLER_MANAGER, "force": "true"}
        await self.api.call("PATCH", self._configuration, query=query, body=body, content_type=APPLY)
        log.info("webhook configuration %s trusts the present CA", self.settings.webhook_configuration)
