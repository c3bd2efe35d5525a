"""Certificates: when they are renewed, what the bundle holds, and in which order the cluster hears of it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime
import ssl
from typing import Any

import pytest

from kvshare_operator.core import certificates
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.memory_api import MemoryClusterApi
from kvshare_operator.edges.secrets import CertificateKeeper, certificate_keeper
from kvshare_operator.settings import Settings

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
NAMES = ["kvshare-webhook.kvshare-system.svc"]
SECRET = "/api/v1/namespaces/kvshare-system/secrets/kvshare-webhook-certificates"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/kvshare"


def first(now: datetime.datetime = NOW) -> certificates.Material:
    """Freshly issued material."""
    renewal = certificates.renewed(None, NAMES, now)
    assert renewal is not None
    return renewal[0]


def test_fresh_material_needs_nothing_and_loads_as_a_server() -> None:
    """A pair that fits, and a CA that the leaf verifies against."""
    material = first()
    assert certificates.renewed(material, NAMES, NOW) is None
    assert certificates.expires(material.certificate) == NOW + certificates.LEAF_LIFETIME
    assert ssl.create_default_context(cadata=material.bundle).get_ca_certs()


def test_certificate_with_five_days_left_is_renewed_by_the_same_ca() -> None:
    """Nobody needs a new bundle for that."""
    material = first()
    renewal = certificates.renewed(material, NAMES, NOW + certificates.LEAF_LIFETIME - 5 * DAY)
    assert renewal is not None
    assert renewal[0].bundle == material.bundle
    assert renewal[0].certificate != material.certificate


def test_new_ca_keeps_the_old_one_in_the_bundle_until_it_ends() -> None:
    """B49: clients trust both during the change."""
    material = first()
    later = NOW + certificates.CA_LIFETIME - 300 * DAY
    renewal = certificates.renewed(material, NAMES, later)
    assert renewal is not None
    assert renewal[0].bundle.count("BEGIN CERTIFICATE") == 2
    assert material.bundle.strip() in renewal[0].bundle
    after = certificates.renewed(renewal[0], NAMES, later + 301 * DAY)
    assert after is not None
    assert after[0].bundle.count("BEGIN CERTIFICATE") == 1


DAMAGE: dict[str, dict[str, Any]] = {
    "no CA": {"bundle": "nothing"},
    "no key of the CA": {"ca_key": "nothing"},
    "no certificate": {"certificate": "nothing"},
    "a key that does not fit": {"key": first().key},
    "a CA that did not sign it": {"bundle": first().bundle, "ca_key": first().ca_key},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_material_is_replaced(damage: dict[str, Any]) -> None:
    """Whatever somebody did to the Secret."""
    renewal = certificates.renewed(dataclasses.replace(first(), **damage), NAMES, NOW)
    assert renewal is not None
    assert certificates.renewed(renewal[0], NAMES, NOW) is None


def test_other_names_need_another_certificate() -> None:
    """The release was renamed."""
    assert certificates.renewed(first(), ["other"], NOW) is not None


def test_keys_do_not_show_in_logs() -> None:
    """repr leaves them out."""
    assert "PRIVATE" not in repr(first())


def cluster() -> MemoryClusterApi:
    """A cluster with the chart's configuration and no Secret."""
    hook = {"name": "inject.kvshare.dev", "clientConfig": {"service": {"name": "kvshare-webhook"}}}
    return MemoryClusterApi({CONFIGURATION: {"metadata": {"uid": "uid-1"}, "webhooks": [hook]}})


def test_api_server_trusts_a_new_ca_before_any_webhook_can_serve_it() -> None:
    """The bundle first, then the Secret; a second look writes nothing."""
    api = cluster()
    keeper = CertificateKeeper(api, Settings())
    asyncio.run(keeper.keep())
    assert [path for _, path in api.writes] == [CONFIGURATION, SECRET]
    (hook,) = api.objects[CONFIGURATION]["webhooks"]
    bundle = base64.b64decode(hook["clientConfig"]["caBundle"]).decode()
    assert base64.b64decode(api.objects[SECRET]["data"]["ca.crt"]).decode() == bundle
    assert hook["clientConfig"]["service"] == {"name": "kvshare-webhook"}
    asyncio.run(keeper.keep())
    assert len(api.writes) == 2


def owners(api: MemoryClusterApi) -> list[str]:
    """UIDs of what the Secret goes with."""
    return [one["uid"] for one in api.objects[SECRET]["metadata"].get("ownerReferences", [])]


def test_secret_goes_with_the_webhook_configuration_and_so_with_the_chart() -> None:
    """No private key outlives it; one that an older release has left without an owner gets it, once."""
    api = cluster()
    keeper = CertificateKeeper(api, Settings())
    asyncio.run(keeper.keep())
    assert owners(api) == ["uid-1"]
    data = api.objects[SECRET]["data"]
    api.objects[SECRET]["metadata"].pop("ownerReferences")
    for _ in range(3):
        asyncio.run(keeper.keep())
    assert owners(api) == ["uid-1"]
    assert len(api.writes) == 3
    api.objects[CONFIGURATION]["metadata"]["uid"] = "uid-2"
    asyncio.run(keeper.keep())
    assert (owners(api), api.objects[SECRET]["data"]) == (["uid-2"], data)


def test_secret_is_written_without_an_owner_where_that_is_forbidden_or_there_is_none() -> None:
    """OpenShift wants the permission to delete it; the webhook must get its certificate all the same."""
    api = MemoryClusterApi()
    asyncio.run(CertificateKeeper(api, Settings()).keep())
    assert owners(api) == []
    api = cluster()
    call, refused = api.call, list[str]()

    async def strict(method: str, path: str, **more: Any) -> Any:
        if "ownerReferences" in ((more.get("body") or {}).get("metadata") or {}):
            refused.append(path)
            raise ApiError(403, "cannot set an ownerRef on a resource you can't delete")
        return await call(method, path, **more)

    api.call = strict  # type: ignore[method-assign]
    keeper = CertificateKeeper(api, Settings())
    for _ in range(3):
        asyncio.run(keeper.keep())
    assert (owners(api), refused) == ([], [SECRET])
    assert set(api.objects[SECRET]["data"]) >= {"ca.crt", "tls.crt", "tls.key"}


def test_ca_that_somebody_cleared_is_written_again() -> None:
    """B51: a re-applied manifest."""
    api = cluster()
    keeper = CertificateKeeper(api, Settings())
    asyncio.run(keeper.keep())
    api.objects[CONFIGURATION]["webhooks"][0]["clientConfig"]["caBundle"] = ""
    asyncio.run(keeper.keep())
    assert api.objects[CONFIGURATION]["webhooks"][0]["clientConfig"]["caBundle"]


def test_controller_keeps_certificates_only_where_nobody_else_does() -> None:
    """With cert-manager or a Secret of the user's it makes no call about them, and needs no permission to."""
    for mode, keeps in (("SelfManaged", True), ("CertManager", False), ("Secret", False)):
        settings = Settings(certificate_mode=mode)
        assert (certificate_keeper(MemoryClusterApi(), settings) is not None) is keeps
