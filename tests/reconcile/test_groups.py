"""LeaderWorkerSets and Ray clusters: one engine in several pods, and what is said when only some of them opted in."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from kvshare_operator.api import names
from kvshare_operator.api.status import Condition, Status
from kvshare_operator.core.pool.members import Member, read_member
from kvshare_operator.core.pool.status import Gathered, Reach, next_status
from pods import SETTINGS, Json, annotated, injected, pod_p0, pool_p1, refused, script_pod

NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
LWS = "leaderworkerset.sigs.k8s.io"
LEADER = "ray start --head && vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"
WORKER = "ray start --address=$(LWS_LEADER_ADDRESS):6379 --block"


def lws_pod(group: int, worker: int, size: int = 2) -> Json:
    """A pod of LeaderWorkerSet `llama`, as its controller makes it, before admission."""
    pod = script_pod(WORKER if worker else LEADER)
    pod["metadata"]["labels"] = {
        f"{LWS}/name": "llama",
        f"{LWS}/group-index": str(group),
        f"{LWS}/worker-index": str(worker),
    }
    pod["metadata"]["annotations"][f"{LWS}/size"] = str(size)
    name = f"llama-{group}-{worker}" if worker else f"llama-{group}"
    pod["metadata"].update(name=name, uid=name)
    pod["metadata"]["ownerReferences"] = [{"kind": "StatefulSet", "name": "llama", "controller": True}]
    return pod


def ray_pod(kind: str, number: int = 0) -> Json:
    """A pod of RayCluster `llama`."""
    pod = script_pod(LEADER if kind == "head" else "ulimit -n 65536; ray start --address=llama-head:6379 --block")
    pod["metadata"]["labels"] = {"ray.io/cluster": "llama", "ray.io/node-type": kind}
    pod["metadata"].update(name=f"llama-{kind}-{number}", uid=f"{kind}-{number}")
    return pod


def member(pod: Json) -> Member:
    """The pod after admission, as the controller keeps it."""
    found = read_member(injected(pod).pod)
    assert found is not None
    return found


def status(*members: Member) -> Status:
    """The status of pool p1 with these members."""
    return next_status(Gathered(pool_p1(), members, Reach(True), SETTINGS.connector_image, NOW))


def consistent(found: Status) -> Condition:
    """The condition about members."""
    return next(one for one in found.conditions or [] if one.type == names.MEMBERS_CONSISTENT)


@pytest.mark.parametrize("pod", [lws_pod(0, 1), ray_pod("worker")], ids=["LeaderWorkerSet", "Ray"])
def test_worker_gets_a_record_and_no_flags(pod: Json) -> None:
    """B28: a flag behind `ray start` would break it; code and record come all the same."""
    outcome = injected(pod)
    assert outcome.record.role == "worker"
    assert outcome.pod["spec"]["containers"][0]["args"] == pod["spec"]["containers"][0]["args"]
    assert not any(entry["name"] == names.ARGS_VARIABLE for entry in outcome.pod["spec"]["containers"][0]["env"])


def test_worker_that_its_controller_has_not_numbered_yet_is_a_worker() -> None:
    """B28: LeaderWorkerSet's own webhook adds the number, and is called after ours where its name comes later."""
    pod = lws_pod(0, 1)
    del pod["metadata"]["labels"][f"{LWS}/worker-index"]
    assert injected(pod).record.role == "worker"


@pytest.mark.parametrize("script", ["start.sh worker --ray_address=$A", "sleep infinity", WORKER])
def test_worker_is_known_by_its_label_whatever_it_runs(script: str) -> None:
    """B28: LeaderWorkerSet examples hide `ray start` in a script of the image."""
    pod = lws_pod(0, 1)
    pod["spec"]["containers"][0]["args"] = [script]
    assert injected(pod).record.role == "worker"


def test_worker_that_starts_vllm_itself_is_a_member_of_its_own() -> None:
    """B28: data-parallel engines in a LeaderWorkerSet run the same command in every pod, and all need the flags."""
    for command in (["vllm", "serve", "org/m", "-tp", "2", "-dp", "4", "--headless"], ["bash", "-c", LEADER]):
        pod = lws_pod(0, 1)
        pod["spec"]["containers"][0].update(command=command, args=[])
        assert injected(pod).record.role == "both"


def test_engine_over_several_pods_without_ray_is_refused_in_all_of_them() -> None:
    """B28: flags in some pods of one engine only would stop it."""
    for worker in (0, 1):
        pod = lws_pod(0, worker)
        words = ["vllm", "serve", "org/m", "-tp", "4", "--nnodes", "2", "--node-rank", str(worker)]
        pod["spec"]["containers"][0].update(command=words, args=[])
        assert refused(pod).code == "MultiNodeUnsupported"


def test_engine_over_several_pods_is_refused_where_a_variable_hides_its_arguments() -> None:
    """B28: as KServe writes it, with the size given by annotation; one node stays one node."""
    for arguments in ("--nnodes 2 --master-addr ${MASTER_ADDR}", "--nnodes $NODES", "--nnodes=$((1 + 1)) $MORE"):
        pod = annotated(script_pod(f"vllm serve org/m -tp 2 {arguments} $KVSHARE_VLLM_ARGS"), tensor_parallel_size="2")
        assert refused(pod).code == "MultiNodeUnsupported", arguments
    single = script_pod("vllm serve org/m -tp 2 --nnodes 1 $KVSHARE_VLLM_ARGS")
    assert injected(single).record.local_tp == 2


def test_connector_of_ones_own_is_seen_before_a_variable_that_hides_arguments() -> None:
    """What stood there stays there, whatever the variable holds."""
    script = "vllm serve org/m -tp 2 --kv-transfer-config '{}' --x $Y $KVSHARE_VLLM_ARGS"
    assert refused(annotated(script_pod(script), tensor_parallel_size="2")).code == "FlagConflict"


def test_leader_follows_the_rules_of_scripts() -> None:
    """B28, B11: with our variable it is injected; without it, or without vLLM in sight, it is refused."""
    assert injected(lws_pod(0, 0)).record.role == "both"
    for script in ("ray start --head && vllm serve org/m -tp 2", "ray start --head --block"):
        pod = lws_pod(0, 0)
        pod["spec"]["containers"][0]["args"] = [script]
        assert refused(pod).code == "ShellWrapper"
    assert refused(pod_p0(command=["ray", "start", "--head", "--block"], args=None)).code == "UnknownLauncher"


def test_whole_groups_are_well() -> None:
    """Two groups of two pods, and a Ray cluster: leaders are members, workers are not waited for."""
    pods = [lws_pod(group, worker) for group in (0, 1) for worker in (0, 1)]
    found = status(*map(member, [*pods, ray_pod("head"), ray_pod("worker")]))
    assert found.problems == []
    assert (consistent(found).status, consistent(found).reason) == ("True", "Unreported")
    assert found.members is not None
    assert (found.members.total, found.members.unreported) == (3, 3)


CASES: dict[str, tuple[list[Json], str, str]] = {
    "a worker without annotation": (
        [lws_pod(0, 0, 3), lws_pod(0, 1, 3)],
        "leaderworkerset/llama, group 0: 2 of 3 pods have opted in",
        f"kubectl -n ns-a delete pods -l {LWS}/name=llama",
    ),
    "a leader without annotation": (
        [lws_pod(0, 1)],
        "leaderworkerset/llama, group 0: its leader has not opted in",
        f"kubectl -n ns-a delete pods -l {LWS}/name=llama",
    ),
    "one group of several": (
        [lws_pod(0, 0), lws_pod(0, 1), lws_pod(1, 0)],
        "leaderworkerset/llama, group 1: 1 of 2 pods have opted in",
        f"kubectl -n ns-a delete pods -l {LWS}/name=llama",
    ),
    "a Ray head without annotation": (
        [ray_pod("worker", 1), ray_pod("worker", 2)],
        "raycluster/llama: its leader has not opted in",
        "kubectl -n ns-a delete pods -l ray.io/cluster=llama",
    ),
}


@pytest.mark.parametrize(("pods", "text", "command"), CASES.values(), ids=CASES.keys())
def test_group_that_opted_in_only_in_part_is_shown(pods: list[Any], text: str, command: str) -> None:
    """B28: condition and problem name the group, what is missing, and the command."""
    found = status(*map(member, pods))
    assert (consistent(found).status, consistent(found).reason) == ("False", "GroupIncomplete")
    assert text in consistent(found).message
    (problem,) = found.problems or []
    assert (problem.owner, problem.reason) == (text.split(",")[0].split(":")[0], "GroupIncomplete")
    assert command in problem.message
