"""Odd pods: every optional field, strange names, unicode, repeated variables, great sizes."""

import copy
import json
import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvshare_operator.api import names
from kvshare_operator.core.injection.inject import Injected
from kvshare_operator.core.injection.patch import difference
from pods import pod_p0, run

Json = dict[str, Any]
WORDS = (
    "a", "x-y", "0", "", " ", "ünïcødé", "日本", "🙂", "a b", "$(HOME)", "$HOME", "`id`", "'", '"', "\\", "\n", "\t",
    "{}", "[1]", "--", "-tp", "null", "true", "~", "%s", "a" * 300, "é", "\u202e",
)  # fmt: skip
NAMES = ("A", "B", "PYTHONPATH", "PYTHONHASHSEED", "KVSHARE_VLLM_ARGS", "VLLM_HOST_IP", "_", "a.b", "A-B", "ключ")
SCRIPTS = (
    "vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS", 'exec vllm serve org/m "$@"', "vllm serve org/m", "sleep 1",
    "cat <<E | sh\nvllm serve org/m\nE", "vllm serve org/m & wait", "", "vllm serve 'org/m",
    "if true; then vllm serve org/m; fi",
)  # fmt: skip
GOOD_FLAGS = (
    ["-tp", "4"],
    ["-pp", "1"],
    ["--port", "8000"],
    ["-O3"],
    ["--served-model-name", "a", "b"],
    ["--enforce-eager"],
)
FLAGS = (
    ["-tp", "2"], ["-tp=4"], ["--tensor-parallel-size", "8"], ["--tensor_parallel_size=2"], ["-pp", "1"],
    ["--block-size", "16"], ["--dtype", "auto"], ["--model", "org/m"], ["--revision", "r"], ["--port", "8000"],
    ["--kv-transfer-config", "{}"], ["--kv-transfer-config.kv_role", "kv_both"], ["--config", "f.yaml"], ["-O3"],
    ["--served-model-name", "a", "b"], ["-tp"], ["-tp", "two"], ["--no-enable-prefix-caching"],
)  # fmt: skip
COMMANDS: tuple[list[str] | None, ...] = (
    None, [], ["vllm", "serve", "org/m"], ["python3", "-m", "vllm.entrypoints.openai.api_server"], ["vllm"],
    ["tini", "--", "vllm", "serve", "org/m"], ["env", "A=1", "vllm", "serve", "org/m"], ["sleep", "1"],
)  # fmt: skip
RESERVED = ("kvshare-payload", "kvshare-report", "data", "dshm")


def odd_pods() -> SearchStrategy[Json]:
    """Pods that opt in to pool p1; some are not valid for Kubernetes itself."""
    return st.randoms(use_true_random=False).map(_pod)


def mistake(pod: Json) -> tuple[bool, str]:
    """What the injection does wrong with a pod.

    Returns:
        whether the pod is injected, and what is wrong; an empty text when nothing is.
    """
    before = json.dumps(pod, sort_keys=True)
    outcome = run(pod)
    if json.dumps(pod, sort_keys=True) != before:
        return False, "the pod that was given has been changed"
    if not isinstance(outcome, Injected):
        return False, "" if outcome.message and outcome.remedy else "refused without message or remedy"
    again = run(outcome.pod)
    if not isinstance(again, Injected) or difference(outcome.pod, again.pod):
        return True, "not the same when it is injected again"
    if missing := _lost(pod, outcome.pod, "pod"):
        return True, f"{missing} is not what it was"
    return True, half_injected(outcome.pod)


def _lost(before: Any, after: Any, where: str) -> str:
    """Where something of the pod's author is gone or changed; what is added does not count. Empty when nowhere."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key not in after:
                return f"{where}.{key}"
            if lost := _lost(value, after[key], f"{where}.{key}"):
                return lost
        return ""
    if isinstance(before, list) and isinstance(after, list):
        rest = iter(after)
        for number, value in enumerate(before):
            if all(_lost(value, one, where) for one in rest):
                return f"{where}[{number}]"
        return ""
    behind_ours = isinstance(before, str) and after in (f"{names.PAYLOAD_PATH}:{before}", names.PAYLOAD_PATH + before)
    return "" if behind_ours or (before == after and isinstance(before, type(after))) else where


def half_injected(pod: Json) -> str:
    """What an injected pod lacks of a whole injection; a variable is what its last entry says. Empty for nothing."""
    engines = [
        one
        for one in pod["spec"]["containers"]
        if any(mount["mountPath"] == names.PAYLOAD_PATH for mount in one.get("volumeMounts", []))
    ]
    if len(engines) != 1:
        return f"{len(engines)} containers have the connector"
    (engine,) = engines
    variables = {entry["name"]: entry.get("value", "") for entry in engine.get("env", [])}
    if not variables.get("PYTHONPATH", "").startswith(names.PAYLOAD_PATH):
        return "the engine does not look for the connector where it is"
    words = [*(engine.get("command") or []), *(engine.get("args") or []), variables.get(names.ARGS_VARIABLE, "")]
    if sum(word.count(".kv_connector=") for word in words) != 1:
        return "the connector is not named exactly once"
    return "" if names.INJECTED in pod["metadata"]["annotations"] else "no record"


def _pod(chance: random.Random) -> Json:
    pod = copy.deepcopy(pod_p0())
    spec = pod["spec"]
    spec["containers"] = [_engine(chance), *(_other(chance, i) for i in range(chance.choice((0, 0, 0, 1, 3))))]
    if chance.random() < 0.3:
        chance.shuffle(spec["containers"])
    if chance.random() < 0.3:
        spec["initContainers"] = [_other(chance, 10 + i) for i in range(chance.randint(0, 3))]
        if spec["initContainers"] and chance.random() < 0.3:
            spec["initContainers"][0]["restartPolicy"] = "Always"
    if chance.random() < 0.5:
        spec["volumes"] = [{"name": name, "emptyDir": {}} for name in chance.sample(RESERVED, chance.randint(0, 2))]
    pod["metadata"]["annotations"] |= _annotations(chance)
    if chance.random() < 0.3:
        pod["metadata"]["labels"] = {f"example.org/{chance.choice('abc')}": chance.choice(("x", "", "1-a"))}
    for field, value in _optional(chance).items():
        if chance.random() < 0.15:
            spec[field] = value
    return pod


def _engine(chance: random.Random) -> Json:
    fields: Json = {}
    form = chance.random()
    if form < 0.15:
        fields["command"] = [chance.choice(("sh", "/bin/bash")), chance.choice(("-c", "-ec", "-lc"))]
        fields["args"] = [chance.choice(SCRIPTS)]
    else:
        fields["command"] = copy.deepcopy(chance.choice(COMMANDS if form < 0.3 else COMMANDS[2:3]))
        sort = FLAGS if chance.random() < 0.3 else GOOD_FLAGS
        flags = ["-tp", "2", *(word for _ in range(chance.randint(0, 4)) for word in chance.choice(sort))]
        fields["args"] = flags + ([chance.choice(WORDS)] if chance.random() < 0.2 else [])
    if chance.random() < 0.4:
        fields["env"] = [_variable(chance) for _ in range(chance.randint(0, 5))]
    if chance.random() < 0.2:
        fields["envFrom"] = [{"configMapRef": {"name": "c", "optional": True}}]
    if chance.random() < 0.03:
        fields["env"] = [{"name": f"N{i}", "value": "x" * 2000} for i in range(300)]
    if chance.random() < 0.3:
        fields["volumeMounts"] = [{"name": "data", "mountPath": chance.choice(("/data", "/opt/kvshare", "/opt"))}]
    if chance.random() < 0.2:
        fields["securityContext"] = {"runAsNonRoot": True, "runAsUser": 1000, "readOnlyRootFilesystem": True}
    if chance.random() < 0.2:
        fields["lifecycle"] = {"preStop": {"sleep": {"seconds": 1}}}
        fields["readinessProbe"] = {"httpGet": {"path": "/health", "port": 8000}}
    container: Json = pod_p0(**fields)["spec"]["containers"][0]
    return container


def _other(chance: random.Random, number: int) -> Json:
    one: Json = {"name": f"side-{number}", "image": chance.choice(("busybox", "example.org/vllm:1"))}
    if chance.random() < 0.3:
        one["args"] = [chance.choice(WORDS) for _ in range(chance.randint(0, 3))]
    if chance.random() < 0.1:
        one["command"] = ["vllm", "serve", "org/other"]
    return one


def _variable(chance: random.Random) -> Json:
    name = chance.choice(NAMES)
    kind = chance.random()
    if kind < 0.7:
        return {"name": name, "value": chance.choice(WORDS)}
    if kind < 0.8:
        return {"name": name}
    if kind < 0.9:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}


def _annotations(chance: random.Random) -> dict[str, str]:
    given = {}
    for name, values in {
        "kvshare.dev/role": ("prefill", "decode", "both", "Prefill", ""),
        "kvshare.dev/container": ("vllm", "nope", ""),
        "kvshare.dev/unknown": ("x",),
        "example.org/note": WORDS,
    }.items():
        if chance.random() < (0.3 if name.startswith("example") else 0.03):
            given[name] = chance.choice(values)
    return given


def _optional(chance: random.Random) -> Json:
    return {
        "serviceAccountName": "default",
        "automountServiceAccountToken": False,
        "hostNetwork": True,
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": chance.choice((0, 30)),
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "hostAliases": [{"ip": "127.0.0.9", "hostnames": ["h"]}],
        "dnsPolicy": "Default",
        "priority": 0,
        "shareProcessNamespace": True,
        "enableServiceLinks": False,
        "readinessGates": [{"conditionType": "example.org/ready"}],
        "imagePullSecrets": [{"name": "s"}],
        "schedulerName": "other",
        "runtimeClassName": "missing",
        "overhead": {"cpu": "1"},
        "affinity": {"nodeAffinity": {}},
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}],
    }
