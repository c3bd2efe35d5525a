"""Self-managed certificates: the Secret that webhooks mount, and the caBundle that the API server trusts.

Why this exists: the controller issues and renews (``core.certificates`` says when); webhooks only read files. Where
somebody else does, no controller needs this, nor the permissions for it.
The bundle reaches the API server before a certificate of a new CA can reach a webhook, so that reviews never
meet a CA they do not know. The Secret belongs to the webhook configuration, so that an uninstalled chart leaves no
private key behind.
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
        self._may_not_own = False
        self._secret = f"/api/v1/namespaces/{settings.namespace}/secrets/{settings.certificate_secret}"
        self._configuration = (
            f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{settings.webhook_configuration}"
        )

    async def keep(self) -> None:
        """Look at both once, and mend them. Raises ApiError."""
        now = datetime.datetime.now(datetime.UTC)
        data, owners = await self._read()
        material = certificates.read_material(data)
        renewal = certificates.renewed(material, self.settings.dns_names, now)
        if renewal is not None:
            material, why = renewal
            await self._write(material, await self._trust(material.bundle))
            log.info("certificates renewed: %s", why)
        elif material is not None:
            owner = await self._trust(material.bundle)
            if owner not in ("", *owners) and not self._may_not_own:
                await self._write(material, owner)

    async def _read(self) -> tuple[dict[str, str], set[str]]:
        """What the Secret holds, and the UIDs of its owners."""
        try:
            secret = await self.api.call("GET", self._secret)
        except ApiError as error:
            if error.status == 404:
                return {}, set()
            raise
        found = {}
        for key, value in (secret.get("data") or {}).items():
            try:
                found[key] = base64.b64decode(value).decode()
            except ValueError:
                log.warning("key %s of Secret %s is not text", key, self.settings.certificate_secret)
        owners = (secret.get("metadata") or {}).get("ownerReferences") or []
        return found, {str(one.get("uid")) for one in owners}

    async def _write(self, material: certificates.Material, owner: str) -> None:
        """Write the Secret; ``owner`` is the UID of the webhook configuration, or empty where there is none."""
        data = {key: base64.b64encode(text.encode()).decode() for key, text in material.to_data().items()}
        metadata: Json = {
            "namespace": self.settings.namespace,
            "name": self.settings.certificate_secret,
            "labels": {"app.kubernetes.io/managed-by": names.CONTROLLER_MANAGER},
        }
        body: Json = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
        query = {"fieldManager": names.CONTROLLER_MANAGER, "force": "true"}
        if owner and not self._may_not_own:
            owned = {**body, "metadata": {**metadata, "ownerReferences": [self._reference(owner)]}}
            try:
                await self.api.call("PATCH", self._secret, query=query, body=owned, content_type=APPLY)
                return
            except ApiError as error:
                if error.status != 403:
                    raise
                # Some clusters want the permission to delete it for that.
                self._may_not_own = True
                log.info("Secret %s gets no owner and outlives the chart: %s", self.settings.certificate_secret, error)
        await self.api.call("PATCH", self._secret, query=query, body=body, content_type=APPLY)

    def _reference(self, uid: str) -> Json:
        kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
        return {**kind, "name": self.settings.webhook_configuration, "uid": uid}

    async def _trust(self, bundle: str) -> str:
        """Have every webhook of our configuration trust ``bundle``; a missing configuration is not ours to make.

        Returns:
            the UID of the configuration, empty when there is none.
        """
        wanted = base64.b64encode(bundle.encode()).decode()
        try:
            present = await self.api.call("GET", self._configuration)
        except ApiError as error:
            if error.status == 404:
                log.warning("webhook configuration %s does not exist", self.settings.webhook_configuration)
                return ""
            raise
        uid, hooks = str((present.get("metadata") or {}).get("uid", "")), present.get("webhooks") or []
        if all((hook.get("clientConfig") or {}).get("caBundle") == wanted for hook in hooks):
            return uid
        body = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": self.settings.webhook_configuration},
            "webhooks": [{"name": hook["name"], "clientConfig": {"caBundle": wanted}} for hook in hooks],
        }
        query = {"fieldManager": names.CONTROLLER_MANAGER, "force": "true"}
        await self.api.call("PATCH", self._configuration, query=query, body=body, content_type=APPLY)
        log.info("webhook configuration %s trusts the present CA", self.settings.webhook_configuration)
        return uid
