"""How a managed store is, as one finding: the reason and the sentence of `StoreReachable`.

Why this exists: what keeps a store from running (no image, too little memory, an object of somebody else) must be
said in the pool's status with the remedy, and in words that stay the same while nothing changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.pool.conditions import Finding, from_refusal

_MESSAGE: Final = 300
_PULLING: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
_HOPEFUL: Final = frozenset({"", "ContainerCreating", "PodInitializing"})


@dataclasses.dataclass(frozen=True)
class StoreState:
    """What was found about one managed store.

    Attributes:
        problem: why its objects could not be made; None when they are as wanted.
        nodes: store nodes that the pool asks for.
        ready_nodes: nodes that reach the master.
        master_ready: whether the master's pod is ready.
        needs: a sentence about the memory of the nodes.
        pod_problems: sentences about pods that do not start, sorted.
    """

    problem: Refusal | None = None
    nodes: int = 0
    ready_nodes: int = 0
    master_ready: bool = False
    needs: str = ""
    pod_problems: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether everything is there and ready."""
        return self.problem is None and self.master_ready and self.ready_nodes >= self.nodes


def managed_finding(state: StoreState | None, address: str, reached: bool | None, why: str) -> Finding:
    """Return `StoreReachable` of a pool with a managed store.

    ``state`` is None where the operator manages no stores; ``reached`` and ``why`` are what a connection from
    the operator to the master said.
    """
    kind = names.STORE_REACHABLE
    if state is None:
        return from_refusal(kind, refusal("ManagedStoreDisabled"))
    if state.problem is not None:
        return from_refusal(kind, state.problem)
    pods = "; ".join(state.pod_problems)
    if not state.master_ready:
        problem = pods or "its pod is not ready yet"
        return from_refusal(kind, refusal("StoreStarting", what="the master", problem=problem))
    if state.ready_nodes == 0:
        problem = f"{pods or 'their pods are not ready yet'}; {state.needs}"
        return from_refusal(kind, refusal("StoreStarting", what=f"none of {state.nodes} node(s)", problem=problem))
    if reached is False:
        return from_refusal(kind, refusal("StoreUnreachable", address=address, problem=why))
    if state.ready_nodes < state.nodes:
        text = f"{state.ready_nodes} of {state.nodes} store nodes are ready"
        return Finding(kind, "True", "NodesMissing", f"{text}: {pods}" if pods else text)
    return Finding(kind, "True", "Reachable", f"{address} and all {state.nodes} store node(s) are ready")


def missing_pods(*owners: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one sentence for each StatefulSet or Deployment whose pods are not even made: quota, admission.

    One that Kubernetes has not looked at yet says nothing.
    """
    found = []
    for owner in owners:
        status = owner.get("status") or {}
        wanted, made = owner["spec"]["replicas"], int(status.get("replicas") or 0)
        if status.get("observedGeneration") == owner["metadata"].get("generation") and made < wanted:
            name = f"{owner['kind']} {owner['metadata']['name']}"
            found.append(
                f"{made} of {wanted} pods of {name} exist, see its events for a quota or policy that refuses them"
            )
    return tuple(found)


def pod_problems(pods: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return one sentence for each pod that does not start, sorted by pod."""
    found = [
        f"{pod['metadata']['name']}: {problem}"
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
        if (problem := pod_problem(pod))
    ]
    kept = found[:3]
    return (*kept, f"and {len(found) - 3} more pod(s)") if len(found) > 3 else tuple(kept)


def pod_problem(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not start; empty when nothing is known to be wrong.

    Texts that change by themselves, such as a back-off's seconds, are left out.
    """
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"cannot be scheduled: {condition.get('message') or condition.get('reason')}"[:_MESSAGE]
    for one in status.get("containerStatuses") or []:
        if one.get("ready"):
            continue
        waiting = str(((one.get("state") or {}).get("waiting") or {}).get("reason") or "")
        ended = (one.get("lastState") or {}).get("terminated") or (one.get("state") or {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            return "was killed because it used more memory than its limit"
        if waiting in _PULLING:
            return f"image {one.get('image')} cannot be pulled"
        if waiting == "CrashLoopBackOff" or ended:
            return f"ends again and again (exit code {ended.get('exitCode', 'unknown')}); see its log"
        if waiting not in _HOPEFUL:
            detail = ((one.get("state") or {}).get("waiting") or {}).get("message") or ""
            return f"{waiting}: {detail}"[:_MESSAGE]
    return ""
