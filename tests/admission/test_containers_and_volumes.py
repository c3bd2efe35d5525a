"""What a member gets beside its flags, and what happens when a name or path is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvshare_operator.core.injection.delivery import same_image
from kvshare_operator.core.quantity import bytes_of
from pods import PAYLOAD, RESTRICTED, SETTINGS, Json, annotated, engine_of, injected, pod_p0, pool_p1, refused

PAYLOAD_MOUNT = {"name": "kvshare-payload", "mountPath": "/opt/kvshare", "readOnly": True}


def init_container(pod: Json) -> Json:
    """The init container of ours."""
    found: Json = pod["spec"]["initContainers"][-1]
    return found


def test_init_containers_of_the_user_stay_and_ours_is_last() -> None:
    """B41: nothing of theirs changes."""
    theirs = {"name": "download", "image": "x", "command": ["download"]}
    pod = pod_p0()
    pod["spec"]["initContainers"] = [theirs]
    after = injected(pod).pod["spec"]["initContainers"]
    assert after[0] == theirs
    assert [one["name"] for one in after] == ["download", "kvshare-payload"]


def test_init_container_fits_into_the_pods_own_request() -> None:
    """B42: requests equal limits (a Guaranteed pod stays one), far below the engine's, and no user id is fixed."""
    ours = init_container(injected(pod_p0()).pod)
    assert ours["image"] == PAYLOAD
    assert ours["resources"]["requests"] == ours["resources"]["limits"] == {"cpu": "100m", "memory": "64Mi"}
    assert "runAsUser" not in ours["securityContext"]


@pytest.mark.parametrize("source", ["InitContainer", "ImageVolume", "Image"])
def test_restricted_pod_stays_restricted(source: str) -> None:
    """B43: every check of the restricted standard, on what was added."""
    pod = pod_p0(securityContext=dict(RESTRICTED))
    pod["spec"]["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    after = injected(pod, pool_p1(connector={"source": source})).pod["spec"]
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "projected", "secret"}
    assert all(set(volume) - {"name"} <= allowed for volume in after["volumes"])
    for container in (*after.get("initContainers", ()), *after["containers"]):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security.get("privileged")
        assert "hostPort" not in str(container.get("ports"))
        assert "runAsUser" not in security
    assert not {"hostNetwork", "hostPID", "hostIPC"} & after.keys()
    if source == "InitContainer":
        assert after["initContainers"][0]["securityContext"]["runAsNonRoot"] is True


def test_effective_request_does_not_grow_and_every_container_has_limits() -> None:
    """B42: with a quota on requests and limits, ours costs nothing: init containers run before the engine."""
    pod = pod_p0()
    pod["spec"]["containers"].append({"name": "proxy", "resources": pod["spec"]["containers"][0]["resources"]})
    after = injected(annotated(pod, container="vllm")).pod["spec"]
    ours = after["initContainers"][0]["resources"]
    for kind in ("requests", "limits"):
        assert {"cpu", "memory"} <= ours[kind].keys()
        total = sum(bytes_of(one["resources"][kind]["memory"]) for one in after["containers"])
        assert bytes_of(ours[kind]["memory"]) < total
    assert [one["resources"] for one in after["containers"]] == [one["resources"] for one in pod["spec"]["containers"]]


def test_pod_that_runs_as_root_is_not_broken_by_our_container() -> None:
    """With `runAsUser: 0` for the pod, a non-root demand of ours would never start."""
    pod = pod_p0()
    pod["spec"]["securityContext"] = {"runAsUser": 0}
    assert "runAsNonRoot" not in init_container(injected(pod).pod)["securityContext"]


def test_report_access_comes_without_a_secret() -> None:
    """A projected token with our audience, and the CA through the downward API."""
    pod = injected(pod_p0()).pod
    volume = next(one for one in pod["spec"]["volumes"] if one["name"] == "kvshare-report")
    token, authority = volume["projected"]["sources"]
    assert token["serviceAccountToken"]["audience"] == "kvshare.dev"
    assert authority["downwardAPI"]["items"][0]["fieldRef"]["fieldPath"].startswith("metadata.annotations[")
    assert pod["metadata"]["annotations"]["kvshare.dev/report-ca"] == SETTINGS.report_ca


def test_without_a_report_endpoint_nothing_is_mounted_for_it() -> None:
    """The command line has no endpoint."""
    pod = injected(pod_p0(), settings=dataclasses.replace(SETTINGS, report_url="")).pod
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["kvshare-payload"]
    assert not any("report_url" in word for word in pod["spec"]["containers"][0]["args"])


TAKEN: dict[str, Json] = {
    "a volume of our name": {"volumes": [{"name": "kvshare-payload", "hostPath": {"path": "/x"}}]},
    "a volume of our report name": {"volumes": [{"name": "kvshare-report", "emptyDir": {}}]},
    "a container of our name": {"initContainers": [{"name": "kvshare-payload", "image": "theirs"}]},
    "a mount at our path": {"mounts": [{"name": "v", "mountPath": "/opt/kvshare/"}]},
    "a mount below our path": {"mounts": [{"name": "v", "mountPath": "/opt/kvshare/x"}]},
    "a parent with subPath": {"mounts": [{"name": "v", "mountPath": "/opt", "subPath": "a"}]},
    "a read-only parent": {"mounts": [{"name": "v", "mountPath": "/opt", "readOnly": True}]},
    "a mount at the report path": {"mounts": [{"name": "v", "mountPath": "/var/run/kvshare"}]},
    "the same behind a link": {"mounts": [{"name": "v", "mountPath": "/run/kvshare"}]},
}


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
def test_taken_name_or_path_is_refused(taken: Json) -> None:
    """B40: nothing is merged, nothing is replaced."""
    pod = pod_p0(volumeMounts=taken.get("mounts"))
    for field in ("volumes", "initContainers"):
        if field in taken:
            pod["spec"][field] = taken[field]
    assert refused(pod).code == "VolumeConflict"


Hand = Callable[[Json], None]
HANDS: dict[str, Hand] = {
    "a mirror": lambda ours: ours.update(image=f"mirror.example.net:5000/cache/{ours['image']}"),
    "a digest": lambda ours: ours.update(image=f"{ours['image']}@sha256:{'0' * 64}"),
    "other resources": lambda ours: ours.update(resources={"limits": {"memory": "1Gi"}}),
    "no resources": lambda ours: ours.pop("resources"),
    "a tighter security context": lambda ours: ours.update(securityContext={"capabilities": {"drop": ["NET_RAW"]}}),
    "a mount before ours": lambda ours: ours["volumeMounts"].insert(0, {"name": "ca", "mountPath": "/ca"}),
    "a variable": lambda ours: ours.update(env=[{"name": "HTTPS_PROXY", "value": "x"}]),
}


@pytest.mark.parametrize("hand", HANDS.values(), ids=HANDS.keys())
def test_second_pass_knows_our_container_though_another_webhook_changed_it(hand: Hand) -> None:
    """B07: webhooks are asked again after others changed the pod; the pod must not be refused for our own work."""
    once = injected(pod_p0()).pod
    hand(init_container(once))
    assert injected(once).pod == once


STRANGERS: dict[str, Json] = {
    "another image": {"image": "example.org/tools:1"},
    "another version": {"image": PAYLOAD.replace(":1", ":2")},
    "another program": {"command": ["sleep"]},
    "another folder": {"args": ["/x"]},
    "another volume": {"volumeMounts": [{"name": "data", "mountPath": "/opt/kvshare"}]},
}


@pytest.mark.parametrize("changed", STRANGERS.values(), ids=STRANGERS.keys())
def test_container_of_our_name_that_does_something_else_is_refused(changed: Json) -> None:
    """B40: what would not bring this version of the connector is no copy of ours."""
    once = injected(pod_p0()).pod
    init_container(once).update(changed)
    assert refused(once).code == "VolumeConflict"


def test_container_of_our_name_beside_the_engine_is_refused() -> None:
    """It would be restarted for ever, and the engine would not wait for it."""
    once = injected(pod_p0()).pod
    once["spec"]["containers"].append(once["spec"]["initContainers"].pop())
    assert refused(annotated(once, container="vllm")).code == "VolumeConflict"


def test_image_volume_from_a_mirror_is_known_again() -> None:
    """B07: and another image in it is a conflict."""
    pool = pool_p1(connector={"source": "ImageVolume"})
    once = injected(pod_p0(), pool).pod
    volume = once["spec"]["volumes"][0]
    volume["image"]["reference"] = f"mirror.example.net/{PAYLOAD}"
    assert injected(once, pool).pod == once
    volume["image"]["reference"] = "example.org/tools:1"
    assert refused(once, pool).code == "VolumeConflict"


SAME: dict[tuple[str, str], bool] = {
    ("a.example/k:1", "b.example/x/k:1"): True,
    ("a.example/k:1@sha256:aa", "b.example/k:1"): True,
    ("a.example/k:1@sha256:aa", "b.example/k@sha256:aa"): True,
    ("a.example/k:1@sha256:aa", "a.example/k:1@sha256:bb"): False,
    ("a.example/k:1", "a.example/k:2"): False,
    ("a.example/k", "a.example/k:2"): False,
    ("localhost:5000/k", "k"): True,
}


@pytest.mark.parametrize(("pair", "same"), SAME.items(), ids=str)
def test_images_are_compared_without_their_registry(pair: tuple[str, str], same: bool) -> None:
    """A mirror has another host and path; a digest decides where both have one."""
    assert same_image(*pair) is same
    assert same_image(*reversed(pair)) is same


def test_writable_parent_mount_is_no_conflict() -> None:
    """A mount point can be made in it."""
    assert injected(pod_p0(volumeMounts=[{"name": "v", "mountPath": "/opt"}]))


SOURCES: dict[str, dict[str, Any]] = {
    "configMap": {"name": "c"},
    "secret": {"secretName": "s"},
    "projected": {"sources": []},
    "downwardAPI": {"items": []},
    "image": {"reference": "example.org/tools:1"},
    "persistentVolumeClaim": {"claimName": "tools", "readOnly": True},
    "nfs": {"server": "files", "path": "/", "readOnly": True},
}


@pytest.mark.parametrize("path", ["/opt", "/var/run", "/run/"])
@pytest.mark.parametrize("source", SOURCES)
def test_parent_that_is_always_read_only_is_a_conflict(source: str, path: str) -> None:
    """B40: in a mounted ConfigMap or read-only claim no mount point can be made: the container would not start."""
    pod = pod_p0(volumeMounts=[{"name": "v", "mountPath": path}])
    pod["spec"]["volumes"] = [{"name": "v", source: SOURCES[source]}]
    assert refused(pod).code == "VolumeConflict"
    pod["spec"]["volumes"] = [{"name": "v", "emptyDir": {}}]
    assert injected(pod)


def test_pull_secrets_are_joined_without_repeats() -> None:
    """B46: those of the pool and of the installation, behind the pod's own."""
    pod = pod_p0()
    pod["spec"]["imagePullSecrets"] = [{"name": "a"}, {"name": "b"}]
    settings = dataclasses.replace(SETTINGS, image_pull_secrets=("a", "d"))
    for source in ("InitContainer", "ImageVolume"):
        pool = pool_p1(connector={"source": source, "imagePullSecrets": [{"name": "a"}, {"name": "c"}]})
        after = injected(pod, pool, settings).pod["spec"]["imagePullSecrets"]
        assert [one["name"] for one in after] == ["a", "b", "c", "d"]
    assert "imagePullSecrets" not in injected(pod_p0(), pool_p1(connector={"source": "Image"}), settings).pod["spec"]


def test_image_volume_is_mounted_on_clusters_that_have_it() -> None:
    """B48: no init container; the packages' folder of the image."""
    spec = injected(pod_p0(), pool_p1(connector={"source": "ImageVolume"})).pod["spec"]
    assert "initContainers" not in spec
    assert spec["volumes"][0] == {"name": "kvshare-payload", "image": {"reference": PAYLOAD}}
    assert spec["containers"][0]["volumeMounts"][0] == {**PAYLOAD_MOUNT, "subPath": "kvshare/python"}


@pytest.mark.parametrize("version", [(1, 30), (1, 34), None])
def test_image_volume_is_refused_on_older_or_unknown_clusters(version: tuple[int, int] | None) -> None:
    """B48: the API server would reject the pod, or drop the field."""
    settings = dataclasses.replace(SETTINGS, server_version=version)
    assert refused(pod_p0(), pool_p1(connector={"source": "ImageVolume"}), settings).code == "ImageVolumeUnsupported"


def test_rdma_adds_devices_and_ipc_lock_only_when_asked() -> None:
    """Both are outside what a plain pod needs."""
    external = {"masterAddress": "m.x.svc:50051"}
    rdma: dict[str, Any] = {"type": "External", "protocol": "RDMA", "external": external}
    plain = engine_of(injected(pod_p0(), pool_p1(store=rdma)))
    assert "securityContext" not in plain
    asked = engine_of(injected(pod_p0(), pool_p1(store={**rdma, "rdma": {"resourceName": "rdma/hca"}})))
    assert asked["resources"]["limits"]["rdma/hca"] == asked["resources"]["requests"]["rdma/hca"] == "1"
    assert asked["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert "--kv-transfer-config.kv_connector_extra_config.protocol=rdma" in asked["args"]


def test_longest_pool_name_is_a_valid_label() -> None:
    """B09: 63 characters, as the schema allows."""
    pool = pool_p1()
    pool["metadata"]["name"] = "p" * 63
    pod = pod_p0()
    pod["metadata"]["annotations"]["kvshare.dev/pool"] = "p" * 63
    after = injected(pod, pool).pod
    assert after["metadata"]["labels"]["kvshare.dev/member"] == "p" * 63
