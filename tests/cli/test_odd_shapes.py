"""`kvshare inject` on manifests in which one field has the shape of another: an answer, never a traceback."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from kvshare_operator.cli.inject_items import items_of, patched
from kvshare_operator.core.pool.view import view
from pods import PAYLOAD, RESTRICTED, SETTINGS, Json, pod_p0, pool_p1

Path = tuple[Any, ...]
RDMA = {
    "type": "External",
    "protocol": "RDMA",
    "rdma": {"resourceName": "rdma/hca"},
    "external": {"masterAddress": "m.x.svc:50051"},
}
VALUES: tuple[Any, ...] = (None, "text", 7, 1.5, True, [], {}, ["a"], {"a": "b"}, [None], [["x"]])


def full_pod() -> Json:
    """P0 with a value in every field that the injection looks at."""
    pod = pod_p0(
        env=[{"name": "A", "value": "b"}, {"name": "PYTHONPATH", "value": "/app"}],
        envFrom=[{"configMapRef": {"name": "c"}}],
        volumeMounts=[{"name": "x", "mountPath": "/x"}],
        securityContext={**RESTRICTED, "capabilities": {"add": ["CHOWN"]}},
    )
    pod["metadata"]["labels"] = {"a": "b"}
    pod["spec"] |= {
        "volumes": [{"name": "x", "emptyDir": {}}],
        "securityContext": {"runAsUser": 1},
        "imagePullSecrets": [{"name": "s"}],
        "initContainers": [{"name": "i", "image": "x", "env": [{"name": "A", "value": "b"}]}],
    }
    return pod


def paths(node: Any, path: Path = ()) -> Iterator[Path]:
    """Where every value of a tree stands."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from paths(value, (*path, key))


def with_value(tree: Json, path: Path, value: Any) -> Json:
    """The same tree with another value in one place."""
    changed = copy.deepcopy(tree)
    node: Any = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = copy.deepcopy(value)
    return changed


@pytest.mark.parametrize("path", list(paths(full_pod())), ids=lambda path: ".".join(map(str, path)))
def test_field_of_another_shape_is_answered(path: Path) -> None:
    """A decision for every template, and a patch that applies, alone and in a Deployment, also with RDMA."""
    for pool in (view(pool_p1(), PAYLOAD), view(pool_p1(store=RDMA), PAYLOAD)):
        for value in VALUES:
            pod = with_value(full_pod(), path, value)
            template = {"metadata": pod["metadata"], "spec": pod["spec"]}
            owner = {
                "kind": "Deployment",
                "metadata": {"name": "d", "namespace": "ns-a"},
                "spec": {"template": template},
            }
            for thing in (pod, owner):
                items = items_of("f", thing, {("ns-a", "p1"): pool}, "ns-a", SETTINGS)
                patched(thing, items)
                assert all(item.reason and item.remedy for item in items if item.decision == "refused")


@pytest.mark.parametrize("field", ["securityContext", "resources"])
def test_field_without_a_value_is_like_none(field: str) -> None:
    """A rendered chart leaves `securityContext:` with nothing behind it."""
    pod = pod_p0()
    pod["spec"]["containers"][0][field] = None
    (item,) = items_of("f", pod, {("ns-a", "p1"): view(pool_p1(store=RDMA), PAYLOAD)}, "ns-a", SETTINGS)
    assert item.decision == "injected"
    container = patched(pod, [item])["spec"]["containers"][0]
    assert container["resources"]["limits"]["rdma/hca"] == "1"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
