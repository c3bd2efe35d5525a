"""RDMA members: device resource, locked memory and network devices, as rendered and as an API server admits them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from installed import bare_api
from kvshare_layout import config
from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal
from kvshare_operator.core.injection.inject import Injected, inject
from kvshare_operator.core.pool.view import view
from pods import PAYLOAD, RESTRICTED, SETTINGS, Json, annotated, pod_p0, pool_p1
from testbed.cluster import Cluster
from testbed.kubectl import KubectlError

EXTERNAL = {"masterAddress": "m.x.svc:50051"}
DEVICES = "rdma/hca"


def rdma_pool(**rdma: Any) -> Json:
    """Pool p1 over RDMA; without keyword arguments nothing is asked of the cluster."""
    store: Json = {"type": "External", "protocol": "RDMA", "external": EXTERNAL}
    return pool_p1(store={**store, "rdma": {"resourceName": DEVICES, **rdma}} if rdma else store)


def asked(pod: Json, pool: Json) -> Injected | Refusal:
    """The injection's answer."""
    return inject(pod, view(pool, PAYLOAD), SETTINGS)


def engine_of(pod: Json, pool: Json) -> Json:
    """The engine's container after injection."""
    result = asked(pod, pool)
    assert isinstance(result, Injected), result
    container: Json = result.pod["spec"]["containers"][0]
    return container


def devices_of(container: Json) -> str:
    """The network devices on the engine's command line, as the connector reads them."""
    prefix = "--kv-transfer-config.kv_connector_extra_config."
    raw = dict(word.removeprefix(prefix).split("=", 1) for word in container["args"] if word.startswith(prefix))
    parsed = config.parse(raw)
    assert parsed.mistakes == ()
    return parsed.config.device_name


def test_pods_own_number_of_devices_is_kept_in_requests_and_limits() -> None:
    """The API server refuses a device whose request is not its limit."""
    for given in ("limits", "requests"):
        container = engine_of(pod_p0(resources={given: {DEVICES: "4"}}), rdma_pool(resourceCount=2))
        assert container["resources"]["limits"][DEVICES] == container["resources"]["requests"][DEVICES] == "4"
    container = engine_of(pod_p0(resources=None), rdma_pool(resourceCount=2))
    assert container["resources"] == {"requests": {DEVICES: "2"}, "limits": {DEVICES: "2"}}


def test_ipc_lock_joins_the_pods_own_capabilities_and_can_be_left_out() -> None:
    """Nothing that the user wrote goes away."""
    own = {"capabilities": {"drop": ["ALL"], "add": ["SYS_NICE"]}, "allowPrivilegeEscalation": False}
    container = engine_of(pod_p0(securityContext=own), rdma_pool(ipcLock="Enabled"))
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_NICE", "IPC_LOCK"]}
    without = engine_of(pod_p0(securityContext=own), rdma_pool(ipcLock="Disabled"))
    assert without["securityContext"] == own


DEVICE_LISTS = {
    "nothing": (None, ""),
    "auto": ("auto", ""),
    "one for all": ("mlx5_0", "mlx5_0"),
    "several for all": (" mlx5_0, mlx5_1 ", "mlx5_0,mlx5_1"),
    "one for each of two ranks": ("mlx5_0/mlx5_1", "mlx5_0/mlx5_1"),
    "a bond": ("mlx5_bond_0", "mlx5_bond_0"),
    "a number": ("0/1", "0/1"),
}


@pytest.mark.parametrize(("given", "devices"), DEVICE_LISTS.values(), ids=DEVICE_LISTS.keys())
def test_network_devices_reach_the_connector(given: str | None, devices: str) -> None:
    """Through a shell-safe flag; `auto` leaves the choice to Mooncake, and injecting again changes nothing."""
    pod = pod_p0() if given is None else annotated(pod_p0(), network_devices=given)
    assert devices_of(engine_of(pod, rdma_pool())) == devices
    once = asked(pod, rdma_pool())
    assert isinstance(once, Injected)
    again = asked(once.pod, rdma_pool())
    assert isinstance(again, Injected)
    assert again.pod == once.pod


@pytest.mark.parametrize("given", ["", "mlx5_0;mlx5_1", "a//b", "$(NIC)", "a,", "/", '"mlx5_0"', "x" * 65])
def test_devices_that_cannot_be_read_are_refused(given: str) -> None:
    """A shell would tear them, or nobody knows what they mean."""
    result = asked(annotated(pod_p0(), network_devices=given), rdma_pool())
    assert isinstance(result, Refusal)
    assert (result.code, names.NETWORK_DEVICES in result.sentence()) == ("AnnotationInvalid", True)


def test_lists_that_do_not_fit_the_ranks_are_refused() -> None:
    """Two ranks, three lists: some rank would get a device that is far away."""
    result = asked(annotated(pod_p0(), network_devices="a/b/c"), rdma_pool())
    assert isinstance(result, Refusal)
    assert "as many as the pod has ranks (2)" in result.sentence()


def test_annotation_without_rdma_has_no_effect_and_says_so() -> None:
    """The pool decides how bytes travel."""
    result = asked(annotated(pod_p0(), network_devices="mlx5_0"), pool_p1())
    assert isinstance(result, Injected)
    assert any("has no effect" in warning for warning in result.warnings)
    assert devices_of(result.pod["spec"]["containers"][0]) == ""


@pytest.fixture(scope="module")
def api() -> Iterator[Cluster]:
    """An API server with a plain and a restricted namespace."""
    with bare_api("plain", "restricted") as (running, _):
        running.kubectl.run("label", "namespace", "restricted", "pod-security.kubernetes.io/enforce=restricted")
        yield running


def admitted(api: Cluster, namespace: str, pool: Json) -> Json:
    """Create a restricted pod that the injection has changed; return it as it is stored."""
    pod = pod_p0(securityContext=RESTRICTED)
    pod["spec"]["securityContext"] = {
        "runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    pod["metadata"]["namespace"] = namespace
    result = asked(annotated(pod, network_devices="mlx5_0/mlx5_1"), pool)
    assert isinstance(result, Injected), result
    text = api.kubectl.within(namespace).run(
        "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(result.pod)
    )
    stored: Json = json.loads(text)
    return stored


@pytest.mark.apiserver
def test_api_server_admits_devices_and_locked_memory(api: Cluster) -> None:
    """As rendered; the restricted standard takes the device, but not the capability."""
    stored = admitted(api, "plain", rdma_pool(ipcLock="Enabled"))["spec"]["containers"][0]
    assert stored["resources"]["limits"][DEVICES] == "1"
    assert stored["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert admitted(api, "restricted", rdma_pool(ipcLock="Disabled"))
    with pytest.raises(KubectlError, match="IPC_LOCK"):
        admitted(api, "restricted", rdma_pool(ipcLock="Enabled"))


def test_replicated_masters_are_handed_to_every_member_as_they_are() -> None:
    """`etcd://` with several addresses, from the pool to the engine's command line."""
    address = "etcd://etcd-0.etcd.x.svc:2379,etcd-1.etcd.x.svc:2379"
    store = {"type": "External", "external": {"masterAddress": address}}
    container = engine_of(pod_p0(), pool_p1(store=store))
    assert f"--kv-transfer-config.kv_connector_extra_config.master_server_address=s:{address}" in container["args"]
