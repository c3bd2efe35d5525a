"""What injection decides about every pod template of a set of documents. Pure.

Why this exists: the webhook sees pods, people have files. This is the bridge: documents in, one item for each
pod template out, decided by the same ``core.injection.inject``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.cli.pod_templates import (
    Path,
    PodTemplate,
    dotted,
    makes_pods_unseen,
    misplaced,
    objects_of,
    pod_templates,
    shape_mistakes,
)
from kvshare_operator.core.injection.inject import inject
from kvshare_operator.core.injection.optin import OptIn, misspelled, read_opt_in, wanted_pool
from kvshare_operator.core.injection.patch import Operation, difference
from kvshare_operator.core.injection.settings import InjectionSettings
from kvshare_operator.core.pool.view import PoolView

Json = dict[str, Any]
Pools = Mapping[tuple[str, str], PoolView | Refusal]
"""Pools by (namespace, name); a Refusal for one that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Item:
    """The decision about one pod template, or about an object that has none but carries our annotations.

    Attributes:
        template_path: dotted path in the object, empty for a Pod, None for an object without a template.
        object_path: where the object stands in its document.
        message: cause, or the warnings of an injection.
        patch: JSON patch of the object.
    """

    source: str
    kind: str
    namespace: str
    name: str
    template_path: str | None
    object_path: Path = ()
    decision: Literal["injected", "unchanged", "refused", "notOptedIn"] = "notOptedIn"
    reason: str = ""
    message: str = ""
    remedy: str = ""
    container: str | None = None
    role: str | None = None
    local_tp: int | None = None
    patch: tuple[Operation, ...] = ()

    def to_json(self) -> Json:
        """Return the documented JSON."""
        return {
            "source": self.source,
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "templatePath": self.template_path,
            "decision": self.decision,
            "reason": self.reason,
            "message": self.message,
            "remedy": self.remedy,
            "container": self.container,
            "role": self.role,
            "localTP": self.local_tp,
            "patch": list(self.patch),
        }

    def in_document(self) -> list[Operation]:
        """Return the patch with paths that begin at the document, for objects of a list."""
        prefix = pointer(self.object_path)
        return [{**one, "path": prefix + one["path"]} for one in self.patch]


def pointer(path: Path) -> str:
    """Return a path as a JSON pointer."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def services_of(contents: Iterable[Any], namespace: str) -> frozenset[tuple[str, str]]:
    """Return (namespace, name) of every Service in some documents; ``namespace`` is for those that name none."""
    found = set()
    for content in contents:
        for _, thing in objects_of(content):
            metadata = thing.get("metadata")
            if thing.get("kind") == "Service" and isinstance(metadata, dict):
                found.add((str(metadata.get("namespace") or namespace), str(metadata.get("name"))))
    return frozenset(found)


def items_of(
    source: str,
    content: Any,
    pools: Pools,
    namespace: str,
    settings: InjectionSettings,
    services: Collection[tuple[str, str]] = (),
) -> list[Item]:
    """Decide about everything in one document; ``namespace`` is for objects that name none.

    ``services`` are (namespace, name) of the Services that are known.
    """
    out: list[Item] = []
    for path, thing in objects_of(content):
        metadata = found if isinstance(found := thing.get("metadata"), dict) else {}
        base = Item(
            source=source,
            kind=str(thing.get("kind", "")),
            namespace=str(metadata.get("namespace") or namespace),
            name=str(metadata.get("name") or metadata.get("generateName") or ""),
            template_path=None,
            object_path=path,
        )
        templates = pod_templates(thing)
        lost = _lost(base, thing, templates)
        for template in templates:
            item = dataclasses.replace(base, template_path=dotted(template.path))
            if isinstance(template.pod["metadata"].get("annotations"), dict) and wanted_pool(template.pod):
                item = _decide(item, template, pools, settings, services)
                lost = () if isinstance(lost, Refusal) else lost
            elif isinstance(lost, Refusal):
                item = _with(item, lost)
            elif isinstance(template.pod["metadata"].get("annotations"), dict):
                item = dataclasses.replace(item, message="; ".join(misspelled(template.pod)))
            out.append(item)
        if not templates and isinstance(lost, Refusal):
            unseen = (
                "no pod template is seen in it; if its own controller hands the annotations on, look at the pods that "
                "it makes: kubectl get pods -o yaml | kvshare inject -f - --pool POOL.yaml"
            )
            out.append(dataclasses.replace(base, message=unseen) if makes_pods_unseen(thing) else _with(base, lost))
    return out


def _lost(item: Item, thing: Json, templates: list[PodTemplate]) -> Refusal | tuple[()]:
    places = misplaced(thing, templates)
    if not places:
        return ()
    expected = " or ".join(dict.fromkeys(dotted((*one.metadata, "annotations")) for one in templates))
    expected = expected or "metadata.annotations of the pod template; this object has none"
    owner = f"{item.kind} {item.name}".strip()
    return refusal("AnnotationMisplaced", places=", ".join(places), owner=owner, expected=expected)


def _with(item: Item, refused: Refusal) -> Item:
    return dataclasses.replace(item, reason=refused.code, message=refused.message, remedy=refused.remedy)


def _refuse(item: Item, refused: Refusal, role: str | None = None) -> Item:
    return dataclasses.replace(_with(item, refused), decision="refused", role=role)


def _decide(
    item: Item,
    template: PodTemplate,
    pools: Pools,
    settings: InjectionSettings,
    services: Collection[tuple[str, str]],
) -> Item:
    if mistakes := shape_mistakes(template.pod):
        return _refuse(item, refusal("ManifestInvalid", problem="; ".join(mistakes)))
    pod = template.admitted()
    wanted = wanted_pool(pod) or ""
    pool = pools.get((item.namespace, wanted))
    opt_in = read_opt_in(pod)
    role = opt_in.role if isinstance(opt_in, OptIn) else None
    if pool is None:
        return _refuse(item, refusal("PoolNotFound", pool=wanted, namespace=item.namespace), role)
    if isinstance(pool, Refusal):
        return _refuse(item, pool, role)
    outcome = inject(pod, pool, settings, {name for place, name in services if place == item.namespace})
    if isinstance(outcome, Refusal):
        refused = _refuse(item, outcome, role)
        return dataclasses.replace(refused, message=" ".join((refused.message, *map("({})".format, misspelled(pod)))))
    patch = tuple(_moved(difference(template.pod, template.written(outcome.pod)), template))
    return dataclasses.replace(
        item,
        decision="injected" if patch else "unchanged",
        message="; ".join((*outcome.warnings, *_pull_secrets(pod, outcome.pod))),
        container=outcome.record.container,
        role=outcome.record.role,
        local_tp=outcome.record.local_tp,
        patch=patch,
    )


def _pull_secrets(before: Json, after: Json) -> Iterable[str]:
    """Kubernetes adds the ServiceAccount's secrets to pods that name none; the webhook comes after that, a file before.

    Source: admission plugin ServiceAccount.
    """
    if after["spec"].get("imagePullSecrets") and not before["spec"].get("imagePullSecrets"):
        yield (
            "with imagePullSecrets here, Kubernetes no longer adds those of the ServiceAccount: "
            "list what its images need as well"
        )


def _moved(operations: Iterable[Operation], template: PodTemplate) -> Iterable[Operation]:
    """Turn paths of a pod into paths of the object that describes it."""
    for operation in operations:
        _, head, *_ = operation["path"].split("/")
        place = template.spec if head == "spec" else template.metadata
        yield {**operation, "path": pointer(place) + operation["path"].removeprefix(f"/{head}")}


def patched(content: Any, items: Iterable[Item]) -> Any:
    """Return a document's content after all patches, as plain values; ``content`` is not changed."""
    result: Any = _copied(content)
    for item in items:
        for operation in item.in_document():
            *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
            node: Any = result
            for part in parents:
                node = node[int(part)] if isinstance(node, list) else node[part]
            if isinstance(node, list) and last == "-":
                node.append(_copied(operation["value"]))
            elif isinstance(node, list):
                node[int(last)] = _copied(operation["value"])
            else:
                node[last] = _copied(operation["value"])
    return result


def _copied(node: Any) -> Any:
    """A deep copy in which nothing is shared, also where YAML aliases made one value stand twice."""
    if isinstance(node, dict):
        return {key: _copied(value) for key, value in node.items()}
    return [_copied(value) for value in node] if isinstance(node, list) else node
