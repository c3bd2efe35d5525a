"""Where pods are described inside other objects.

Why this exists: pods are written in many kinds, also in kinds that we have never heard of. A pod template is
known by its shape, not by its kind: a mapping whose `spec` has `containers` (Deployment, CronJob,
LeaderWorkerSet, JobSet, ...), or a bare pod specification (KServe), whose annotations stand beside it or at
its object. Pure: plain values in, plain values out.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.core.injection.optin import USER_ANNOTATIONS
from kvshare_operator.core.pool.groups import LWS_WORKER

Json = dict[str, Any]
Path = tuple[str | int, ...]
_OWN_ANNOTATIONS_ONLY: Final = frozenset({"LLMInferenceService", "LLMInferenceServiceConfig"})
"""Kinds with bare pod specifications that do not hand our annotations of the object itself to their pods."""


@dataclasses.dataclass(frozen=True)
class PodTemplate:
    """One pod as an object describes it.

    Attributes:
        path: where it stands in the object; empty for a Pod.
        spec: path of the pod's `spec`.
        metadata: path of the mapping that holds its `annotations` and `labels`.
        pod: metadata and spec, plain values.
        worker: True for the workers of a group that has its own leader template.
    """

    path: Path
    spec: Path
    metadata: Path
    pod: Json
    worker: bool = False

    def admitted(self) -> Json:
        """Return the pod as the webhook would see it: workers carry the label of their group by then."""
        pod = copy.deepcopy(self.pod)
        if self.worker:
            pod["metadata"]["labels"] = {**(pod["metadata"].get("labels") or {}), LWS_WORKER: "1"}
        return pod

    def written(self, pod: Json) -> Json:
        """Return a pod as the template would say it: the reverse of ``admitted``."""
        labels = {key: value for key, value in pod["metadata"].get("labels", {}).items() if key != LWS_WORKER}
        return {**pod, "metadata": {**pod["metadata"], "labels": labels}} if self.worker else pod


def dotted(path: Path) -> str:
    """Return `spec.template`, or `spec.replicatedJobs[0].template`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def at(tree: Any, path: Path) -> Any:
    """Return the value at a path; None when there is none."""
    for part in path:
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def objects_of(document: Any, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Return every Kubernetes object of a document with its path; lists of objects are opened.

    In a list of one kind (`PodList`), as the API server writes it, the items do not repeat their kind.
    """
    if not isinstance(document, dict):
        return
    items, kind = document.get("items"), str(document.get("kind", ""))
    if isinstance(items, list) and kind.endswith("List"):
        implied = {"kind": kind.removesuffix("List")} if kind != "List" else {}
        for number, item in enumerate(items):
            full = {**implied, **item} if isinstance(item, dict) else item
            yield from objects_of(full, (*path, "items", number))
    elif document.get("kind") or document.get("apiVersion"):
        yield path, document


def pod_templates(thing: Json) -> list[PodTemplate]:
    """Return all pod templates of an object, in its own order."""
    return list(_search(thing, thing, ()))


def _search(root: Json, node: Any, path: Path) -> Iterator[PodTemplate]:
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _search(root, item, (*path, number))
    if not isinstance(node, dict):
        return
    if _has_containers(node.get("spec")) and not _is_bare(root, path):
        yield _template(root, node, path)
        return
    if _has_containers(node):
        yield _bare(root, path)
        return
    for key, value in node.items():
        yield from _search(root, value, (*path, key))


def _is_bare(root: Json, path: Path) -> bool:
    """A whole object that is no Pod has a bare pod specification as its `spec` (KServe's ServingRuntime)."""
    return path == () and root.get("kind") != "Pod"


def _has_containers(node: Any) -> bool:
    containers = node.get("containers") if isinstance(node, dict) else None
    return isinstance(containers, list) and bool(containers) and all(isinstance(one, dict) for one in containers)


def _template(root: Json, node: Json, path: Path) -> PodTemplate:
    metadata = node.get("metadata")
    pod = {**node, "metadata": {**metadata} if isinstance(metadata, dict) else {}}
    leader = at(root, (*path[:-1], "leaderTemplate")) if path[-1:] == ("workerTemplate",) else None
    return PodTemplate(path, (*path, "spec"), (*path, "metadata"), copy.deepcopy(pod), leader is not None)


def _bare(root: Json, path: Path) -> PodTemplate:
    """A pod specification without metadata: annotations count where the opt-in stands, ours join it there."""
    places: list[Path] = [path, path[:-1]]
    if str(root.get("kind")) not in _OWN_ANNOTATIONS_ONLY:
        places.append(("metadata",))
    holder = next((place for place in places if names.POOL in (_annotations(at(root, place)))), places[-1])
    found = at(root, holder)
    metadata = {key: found[key] for key in ("annotations", "labels") if isinstance(found, dict) and key in found}
    spec = {key: value for key, value in at(root, path).items() if key not in ("annotations", "labels")}
    return PodTemplate(path, path, holder, copy.deepcopy({"metadata": metadata, "spec": spec}))


def _annotations(node: Any) -> Mapping[str, Any]:
    found = node.get("annotations") if isinstance(node, dict) else None
    return found if isinstance(found, dict) else {}


def makes_pods_unseen(thing: Json) -> bool:
    """Whether an object without a pod template may make pods all the same, and hand annotations to them.

    Custom resources may (Dynamo's `extraPodMetadata`); Kubernetes' own kinds are known not to.
    """
    group = str(thing.get("apiVersion", "")).rpartition("/")[0]
    return "." in group and not group.endswith(".k8s.io")


def misplaced(thing: Json, templates: list[PodTemplate]) -> list[str]:
    """Return places with annotations of ours that no pod gets, for example `metadata.annotations` of a Deployment.

    Ours as labels count as well: a label opts nothing in.
    """
    right = {(*template.metadata, "annotations") for template in templates}
    found = []
    for path, node in _mappings(thing, ()):
        if path[-1:] == ("annotations",) and path not in right and USER_ANNOTATIONS & node.keys():
            found.append(dotted(path))
        if path[-1:] == ("labels",) and USER_ANNOTATIONS & node.keys():
            found.append(dotted(path))
    return found


def _mappings(node: Any, path: Path) -> Iterator[tuple[Path, Json]]:
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _mappings(item, (*path, number))
    elif isinstance(node, dict):
        yield path, node
        for key, value in node.items():
            yield from _mappings(value, (*path, key))


def shape_mistakes(pod: Json) -> list[str]:
    """Return what the API server would refuse before any webhook looks: text where lists belong, and the like."""
    mistakes = []

    def expect(good: bool, path: str, given: Any, expected: str) -> None:
        if not good:
            mistakes.append(f"{path} is {given!r}, {expected} is expected")

    for field in ("annotations", "labels"):
        values = pod["metadata"].get(field)
        expect(values is None or isinstance(values, dict), f"metadata.{field}", values, "a mapping")
        for key, value in values.items() if isinstance(values, dict) else ():
            expect(isinstance(value, str), f"metadata.{field}[{key}]", value, "text in quotes")
    for field in ("volumes", "initContainers", "imagePullSecrets"):
        expect(_named(pod["spec"].get(field)), f"spec.{field}", pod["spec"].get(field), "a list of mappings")
    security = pod["spec"].get("securityContext")
    expect(security is None or isinstance(security, dict), "spec.securityContext", security, "a mapping")
    for number, container in enumerate(pod["spec"]["containers"]):
        where = f"spec.containers[{number}]"
        expect(isinstance(container.get("name"), str), f"{where}.name", container.get("name"), "a name")
        for field in ("command", "args"):
            words = container.get(field)
            good = words is None or (isinstance(words, list) and all(isinstance(word, str) for word in words))
            expect(good, f"{where}.{field}", words, "a list of texts (numbers in quotes)")
        for field in ("env", "volumeMounts"):
            expect(_named(container.get(field)), f"{where}.{field}", container.get(field), "a list of mappings")
        listed = container.get("envFrom")
        good = listed is None or (isinstance(listed, list) and all(isinstance(one, dict) for one in listed))
        expect(good, f"{where}.envFrom", listed, "a list of mappings")
        for path in (("resources",), ("resources", "limits"), ("resources", "requests"), ("securityContext",)):
            value = at(container, path)
            expect(value is None or isinstance(value, dict), ".".join((where, *path)), value, "a mapping")
        capabilities = at(container, ("securityContext", "capabilities"))
        added = at(capabilities, ("add",))
        good = capabilities is None or (isinstance(capabilities, dict) and (added is None or isinstance(added, list)))
        expect(good, f"{where}.securityContext.capabilities", capabilities, "a mapping with lists")
    return mistakes


def _named(listed: Any) -> bool:
    """Whether a value is what Kubernetes takes for a list of things with names; nothing at all is one as well."""
    return listed is None or (
        isinstance(listed, list)
        and all(isinstance(one, dict) and isinstance(one.get("name", ""), str) for one in listed)
    )
