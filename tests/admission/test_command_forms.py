"""Every way in which people start vLLM: injected where our flags can reach it, else refused with a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvshare_operator.api import names
from pods import annotated, engine_of, flags_of, injected, pod_p0, pool_p1, refused, script_pod, variables

OURS = f"${names.ARGS_VARIABLE}"


def test_plain_list_gets_the_flags_once_with_store_tp_and_namespace() -> None:
    """The base pod: flags are appended behind what the user wrote."""
    outcome = injected(pod_p0())
    args = engine_of(outcome)["args"]
    assert args[:2] == ["--tensor-parallel-size", "2"]
    assert args.count("--kv-transfer-config.kv_connector=KVShareConnector") == 1
    assert "--kv-transfer-config.kv_connector_extra_config.store_tp_size=4" in args
    assert "--kv-transfer-config.kv_load_failure_policy=recompute" in args
    assert any(word.endswith(f"cache_namespace=s:{outcome.record.cache_namespace}") for word in args)
    assert "--block-size=16" in args
    assert "--prefix-caching-hash-algo=sha256_cbor" in args


INJECTED_ARGS: dict[str, dict[str, Any]] = {
    "tini": {"command": ["tini", "--", "vllm", "serve", "org/m"]},
    "tini with options": {"command": ["/usr/bin/tini", "-g", "-p", "SIGTERM", "--", "vllm", "serve", "org/m"]},
    "dumb-init": {"command": ["dumb-init", "vllm", "serve", "org/m"]},
    "env with assignments": {"command": ["env", "A=b", "-u", "X", "vllm", "serve", "org/m"]},
    "catatonit": {"command": ["catatonit", "--", "vllm", "serve", "org/m"]},
    "two prefixes": {"command": ["tini", "--", "nice", "-n", "5", "vllm", "serve", "org/m"]},
    "numactl": {"command": ["numactl", "--cpunodebind=0", "-m", "0", "vllm", "serve", "org/m"]},
    "taskset with a mask": {"command": ["taskset", "-c", "0-7", "vllm", "serve", "org/m"]},
    "another user": {"command": ["gosu", "vllm", "vllm", "serve", "org/m"]},
    "a time limit": {"command": ["timeout", "-k", "5", "1h", "vllm", "serve", "org/m"]},
    "tracing": {"command": ["opentelemetry-instrument", "vllm", "serve", "org/m"]},
    "python -m api_server": {
        "command": ["python3", "-u", "-m", "vllm.entrypoints.openai.api_server"],
        "args": ["--model", "org/m", "-tp", "2"],
    },
    "python -m vllm": {"command": ["python", "-m", "vllm.entrypoints.cli.main", "serve", "org/m"]},
    "a path to vllm": {"command": ["/opt/venv/bin/vllm", "serve", "org/m"]},
    "python with a path to vllm": {"command": ["python3.12", "/usr/local/bin/vllm", "serve", "org/m"]},
    "everything in args": {"command": ["vllm"], "args": ["serve", "org/m", "-tp=2"]},
    "vLLM's own image without a command": {
        "command": None,
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--model", "org/m", "-tp", "2"],
    },
    "vLLM's own image through a mirror": {
        "command": None,
        "image": "registry.corp/mirror/vllm/vllm-openai@sha256:abc",
        "args": ["--model=org/m", "--tensor_parallel_size=2"],
    },
    "exec with arguments behind the script": {
        "command": ["sh", "-c", 'exec "$@"', "x", "vllm", "serve", "org/m"],
        "args": ["-tp", "2"],
    },
}


@pytest.mark.parametrize("fields", INJECTED_ARGS.values(), ids=INJECTED_ARGS.keys())
def test_form_is_injected_through_args(fields: dict[str, Any]) -> None:
    """B13, B15: launcher prefixes and known images do not hide vLLM."""
    container = engine_of(injected(pod_p0(**fields)))
    assert flags_of(container)
    assert names.ARGS_VARIABLE not in variables(container)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a script without our variable": (
        {"command": ["/bin/bash", "-c"], "args": ["pip install x && exec vllm serve org/m --tensor-parallel-size=2"]},
        "ShellWrapper",
    ),
    "a shell behind tini": (
        {"command": ["tini", "--", "bash", "-c", "vllm serve org/m"], "args": None},
        "ShellWrapper",
    ),
    "a shell behind dumb-init": (
        {"command": ["dumb-init", "sh", "-c", "vllm serve org/m"], "args": None},
        "ShellWrapper",
    ),
    "a shell behind another user": ({"command": ["gosu", "1000", "bash", "-c", "vllm serve org/m"]}, "ShellWrapper"),
    "a shell behind env": ({"command": ["env", "A=b", "bash", "-lc", "vllm serve org/m"]}, "ShellWrapper"),
    "an unknown prefix": ({"command": ["mystery-run", "vllm", "serve", "org/m"]}, "UnknownLauncher"),
    "a prefix without a program": ({"command": ["tini", "--"], "args": None}, "UnknownLauncher"),
    "a prefix that nobody can see": (
        {"command": ["$(START)", "vllm", "serve", "org/m"], "envFrom": [{"configMapRef": {"name": "c"}}]},
        "UnknownLauncher",
    ),
    "a script file": ({"command": ["bash", "/scripts/run.sh"]}, "ShellWrapper"),
    "an unknown image without a command": (
        {"command": None, "image": "corp/llm:1", "args": ["--model", "org/m"]},
        "EntrypointUnknown",
    ),
    "neither command nor args": ({"command": None, "args": None}, "NoCommand"),
    "an unknown program": ({"command": ["/app/start"]}, "UnknownLauncher"),
    "vllm bench": ({"command": ["vllm", "bench", "serve"]}, "UnknownLauncher"),
    "an emptied environment": ({"command": ["env", "-i", "vllm", "serve", "org/m"]}, "UnknownLauncher"),
    "an emptied environment, among other options": (
        {"command": ["env", "-vi", "vllm", "serve", "org/m"]},
        "UnknownLauncher",
    ),
    "a command line in one word": ({"command": ["env", "-Svllm serve org/m"]}, "UnknownLauncher"),
    "python that ignores PYTHONPATH": (
        {"command": ["python3", "-I", "-m", "vllm", "serve", "org/m"]},
        "UnknownLauncher",
    ),
    "a shell that does not split variables": (
        {"command": ["zsh", "-c", f"vllm serve org/m -tp 2 {OURS}"], "args": None},
        "ShellWrapper",
    ),
    "vLLM started by Ray": (
        {"command": ["ray", "symmetric-run", "--address", "h:6379", "--", "vllm", "serve", "org/m"]},
        "UnknownLauncher",
    ),
    "a job of Ray": ({"command": ["ray", "job", "submit", "--", "vllm", "serve", "org/m"]}, "UnknownLauncher"),
    "Ray that is only asked": ({"command": ["bash", "-c", "ray status; sleep 9"], "args": None}, "ShellWrapper"),
    "SGLang": ({"command": ["python3", "-m", "sglang.launch_server"]}, "EngineUnsupported"),
    "TensorRT-LLM": ({"command": ["trtllm-serve", "org/m"]}, "EngineUnsupported"),
    "a bare --": ({"args": ["-tp", "2", "--"]}, "FlagConflict"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_form_is_refused_with_reason_and_remedy(fields: dict[str, Any], reason: str) -> None:
    """B11, B13, B15: what we cannot see into is refused, with a cause and a way out."""
    answer = refused(pod_p0(**fields))
    assert answer.code == reason
    assert answer.message
    assert answer.remedy


def test_script_file_is_injected_once_it_is_started_as_its_refusal_says() -> None:
    """B11: the line in the message is taken as it stands, with the size that nobody can read in the file."""
    message = refused(pod_p0(command=["bash", "/scripts/run.sh"])).message
    (line,) = re.findall(r"sh -c '(.+?)'", message)
    pod = annotated(pod_p0(command=["sh", "-c", line], args=None), **{"tensor-parallel-size": "2"})
    assert variables(engine_of(injected(pod)))[names.ARGS_VARIABLE]


def test_image_is_injected_once_its_entrypoint_is_declared() -> None:
    """B15: the annotation stands for what the webhook cannot see."""
    pod = pod_p0(command=None, image="corp/llm:1", args=["--model", "org/m", "-tp", "2"])
    assert flags_of(engine_of(injected(annotated(pod, entrypoint="forwards-args"))))


def test_declared_image_without_tp_is_unknown_and_not_one() -> None:
    """B15: the ENTRYPOINT may set a TP size of its own."""
    pod = annotated(pod_p0(command=None, image="corp/llm:1", args=["--model", "org/m"]), entrypoint="forwards-args")
    assert refused(pod).code == "TPUnknown"


REACHES = {
    "unquoted": f"pip install x && exec vllm serve org/m --tensor-parallel-size=2 {OURS}",
    "with braces": "vllm serve org/m -tp 2 ${KVSHARE_VLLM_ARGS}",
    "with an empty default": "vllm serve org/m -tp 2 ${KVSHARE_VLLM_ARGS:-}",
    "in a continued line": f"vllm serve org/m \\\n  -tp 2 \\\n  {OURS}\n",
    "in both branches": f"if x; then vllm serve org/m -tp 2 {OURS}; else vllm serve org/m -tp 2 {OURS}; fi",
    "behind redirections": f"vllm serve org/m -tp 2 {OURS} >/tmp/log 2>&1",
    "in a pipe": f"vllm serve org/m -tp 2 {OURS} | tee log",
    "in eval": f'eval "vllm serve org/m -tp 2 {OURS}"',
    "split by blanks as ever": f"IFS=$' \\t\\n'; vllm serve org/m -tp 2 {OURS}",
    "split, while one command reads lines": f"while IFS= read l; do :; done <f; vllm serve org/m -tp 2 {OURS}",
    "behind a comment line": f"# it's here\nvllm serve org/m -tp 2 {OURS}",
}


@pytest.mark.parametrize("script", REACHES.values(), ids=REACHES.keys())
def test_script_that_expands_our_variable_is_injected_by_environment(script: str) -> None:
    """B11, B12x: the script's author says where the flags go; args stay as they are."""
    pod = script_pod(script)
    container = engine_of(injected(pod))
    assert container["args"] == pod["spec"]["containers"][0]["args"]
    assert variables(container)[names.ARGS_VARIABLE].startswith("--kv-transfer-config.kv_connector=")


DOES_NOT_REACH = {
    "only in a comment": f"vllm serve org/m -tp 2 # {OURS}",
    "in single quotes": f"vllm serve org/m -tp 2 '{OURS}'",
    "escaped": f"vllm serve org/m -tp 2 \\{OURS}",
    "in a here-document with a quoted mark": f"cat <<'E'\n{OURS}\nE\nvllm serve org/m -tp 2",
    "in a here-document": f"cat <<E\n{OURS}\nE\nvllm serve org/m -tp 2",
    "double-quoted": f'vllm serve org/m -tp 2 "{OURS}"',
    "double-quoted inside eval": f'eval "vllm serve org/m -tp 2 \\"{OURS}\\""',
    "only printed": f"echo {OURS}; vllm serve org/m -tp 2",
    "printed, and vLLM started elsewhere": f"echo {OURS}; ./start.sh",
    "in one branch only": f"if x; then vllm serve org/m -tp 2 {OURS}; else vllm serve org/m -tp 2; fi",
    "another variable": "vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS_EXTRA",
    "in a command substitution": f"vllm serve org/m -tp 2 --seed $(echo {OURS})",
    "glued to other text": f"vllm serve org/m -tp 2 --x={OURS}",
    "behind an escaped blank": f"vllm serve org/m -tp 2 \\ {OURS}",
    "twice in one word": f"vllm serve org/m -tp 2 {OURS}{OURS}",
    "set by the script": f"KVSHARE_VLLM_ARGS=--x; vllm serve org/m -tp 2 {OURS}",
    "unset by the script": f"unset KVSHARE_VLLM_ARGS; vllm serve org/m -tp 2 {OURS}",
    "arguments behind shift": 'shift; vllm serve org/m -tp 2 "$@"',
    "arguments behind set": 'set -- a b; vllm serve org/m -tp 2 "$@"',
    "arguments of a function": 'f() { vllm serve org/m -tp 2 "$@"; }; f',
    "arguments that are counted": 'if [ $# -gt 1 ]; then x; fi; vllm serve org/m -tp 2 "$@"',
    "arguments beside one with a default": 'M=${1:-org/m}; vllm serve $M -tp 2 "$@"',
    "arguments whose first one is asked for": 'if [ -n "${1:-}" ]; then x; fi; vllm serve org/m -tp 2 "$@"',
    "arguments that a loop walks through": 'for a in "$@"; do x $a; done; vllm serve org/m -tp 2 "$@"',
    "arguments that a loop walks through unsaid": 'for a; do x $a; done; vllm serve org/m -tp 2 "$@"',
    "arguments that are options of the script": 'while getopts t: o; do :; done; vllm serve org/m -tp 2 "$@"',
    "arguments of which some are taken": 'x "${@:2}"; vllm serve org/m -tp 2 "$@"',
    "arguments beside one that ours would be": 'vllm serve $1 -tp 2 "$@"',
    "arguments glued to text": "vllm serve org/m -tp 2 x$@",
    "in front of vLLM": f"env A=b {OURS} vllm serve org/m -tp 2",
    "in front of vLLM, arguments behind": f'env {OURS} vllm serve org/m -tp 2 "$@"',
    "in an emptied environment": f"env -i vllm serve org/m -tp 2 {OURS}",
    "not split, as in strict scripts": f"set -euo pipefail\nIFS=$'\\n\\t'\nvllm serve org/m -tp 2 {OURS}",
    "torn at other characters": f"IFS=' =:'; vllm serve org/m -tp 2 {OURS}",
    "arguments that IFS tears": "IFS=$'\\n\\t'; vllm serve org/m -tp 2 $@",
    "not split, by an export": f"export IFS=,; vllm serve org/m -tp 2 {OURS}",
    "not split, for another script": f"IFS=,; ./run.sh {OURS}",
    "the program itself": f"{OURS} vllm serve org/m",
    "a joined list of arguments": 'vllm serve org/m -tp 2 "$*"',
}


@pytest.mark.parametrize("script", DOES_NOT_REACH.values(), ids=DOES_NOT_REACH.keys())
def test_script_that_never_expands_it_for_vllm_is_refused(script: str) -> None:
    """B11, B12x: text that looks like our variable is not an expansion of it."""
    assert refused(script_pod(script)).code == "ShellWrapper"


@pytest.mark.parametrize(
    "prologue",
    [
        "set -euo pipefail", "set -o errexit -o pipefail", "set -x +e", "for f in a b; do x $f; done", 'echo "with $@"',
        "for ((i = 0; i < 3; i++)); do x; done", "IFS=$'\\n\\t'",
    ],
)  # fmt: skip
def test_arguments_behind_what_leaves_them_alone_are_appended_to(prologue: str) -> None:
    """B26: options of the shell and loops over other words do not touch `$@`."""
    assert flags_of(engine_of(injected(script_pod(f'{prologue}; exec vllm serve org/m -tp 2 "$@"'))))


def test_bare_dashes_in_front_of_our_variable_are_refused() -> None:
    """B12x: what stands behind them is no option any more; in front of them it is."""
    assert refused(script_pod(f"vllm serve org/m -tp 2 -- {OURS}")).code == "FlagConflict"
    assert injected(script_pod(f"vllm serve org/m -tp 2 {OURS} --"))


def test_kserve_eval_gets_the_flags_behind_the_script() -> None:
    """B26: `eval "... $@"` passes further words on; the first one would be `$0`, so a filler stands before."""
    script = 'eval "vllm serve /mnt/models ${VLLM_ADDITIONAL_ARGS} $@"'
    env = [{"name": "VLLM_ADDITIONAL_ARGS", "value": "--tensor-parallel-size 2"}]
    pool = pool_p1(model={"name": "org/m", "paths": ["/mnt/models"]})
    alone = engine_of(injected(script_pod(script, env=env), pool))
    assert alone["args"][:2] == [script, "bash"]
    assert alone["args"][2].startswith("--kv-transfer-config.")
    with_words = engine_of(injected(script_pod(script, "--", "--port", "80", env=env), pool))
    assert with_words["args"][:4] == [script, "--", "--port", "80"]


TP: dict[str, tuple[list[str], int]] = {
    "long": (["--tensor-parallel-size", "2"], 2),
    "with =": (["--tensor-parallel-size=2"], 2),
    "short": (["-tp", "4"], 4),
    "short with =": (["-tp=4"], 4),
    "underscores": (["--tensor_parallel_size", "4"], 4),
    "mixed": (["--tensor_parallel-size=4"], 4),
    "abbreviated": (["--tensor-par", "4"], 4),
    "the last one wins": (["-tp", "2", "--tensor-parallel-size", "4"], 4),
    "behind a list of names": (["--served-model-name", "a", "b", "-tp", "2"], 2),
    "behind an unknown option": (["--brand-new-option", "9", "-tp", "2"], 2),
}


@pytest.mark.parametrize(("args", "size"), TP.values(), ids=TP.keys())
def test_tensor_parallel_size_is_read_in_every_spelling(args: list[str], size: int) -> None:
    """All spellings that vLLM's parser takes."""
    assert injected(pod_p0(args=args)).record.local_tp == size


def test_variables_are_expanded_as_the_kubelet_does() -> None:
    """`$(VAR)` of literal entries is known, also through another entry."""
    env = [{"name": "N", "value": "2"}, {"name": "TP", "value": "$(N)"}]
    assert injected(pod_p0(args=["-tp", "$(TP)"], env=env)).record.local_tp == 2


def test_reference_ends_at_the_first_bracket_as_for_the_kubelet() -> None:
    """`$(x $(TP))` names a variable `x $(TP`, which there is not: a shell gets it as it is written."""
    env = [{"name": "TP", "value": "2"}]
    answer = refused(pod_p0(args=["-tp", "$(x $(TP)"], env=env))
    assert "'$(x $(TP)'" in answer.message
    script = f'vllm serve org/m -tp 2 --host "$(x $(hostname))" {OURS}'
    assert injected(script_pod(script, envFrom=[{"secretRef": {"name": "s"}}])).record.local_tp == 2


UNKNOWN: dict[str, dict[str, Any]] = {
    "by reference": {
        "args": ["-tp", "$(TP)"],
        "env": [{"name": "TP", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}],
    },
    "perhaps from envFrom": {"args": ["-tp", "$(TP)"], "envFrom": [{"configMapRef": {"name": "c"}}]},
    "not a number": {"args": ["-tp", "two"]},
    "in a --config file": {"args": ["--config", "/cfg/vllm.yaml"]},
    "in a --config file with =": {"args": ["--config=/cfg/vllm.yaml"]},
    "without a value": {"args": ["-tp"]},
}


@pytest.mark.parametrize("fields", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_tp_that_cannot_be_read_is_unknown_until_it_is_declared(fields: dict[str, Any]) -> None:
    """B23: never taken for 1; the annotation settles it."""
    assert refused(pod_p0(**fields)).code == "TPUnknown"
    if fields["args"] not in (["-tp"], ["-tp", "two"]):
        assert injected(annotated(pod_p0(**fields), tensor_parallel_size="2")).record.local_tp == 2


def test_options_that_a_config_file_may_hold_are_not_taken_for_defaults() -> None:
    """B23: pP and KV dtype are compared only where they can be seen; a warning says so."""
    pool = pool_p1(pipelineParallelSizes=[2], cache={"dtype": "fp8"})
    outcome = injected(pod_p0(args=["--config", "/cfg/vllm.yaml", "-tp", "2"]), pool)
    assert any("--config" in warning for warning in outcome.warnings)
    assert refused(pod_p0(args=["--config", "/c.yaml", "-tp", "2", "-pp", "4"]), pool).code == "PPMismatch"


def test_script_with_a_computed_tp_needs_the_annotation() -> None:
    """A program's output cannot be seen."""
    pod = script_pod(f"vllm serve org/m -tp $(nvidia-smi -L | wc -l) {OURS}")
    assert refused(pod).code == "TPUnknown"
    assert injected(annotated(pod, tensor_parallel_size="4")).record.local_tp == 4


LISTS = {
    "the model too": (f'A=(org/m -tp 4)\nvllm serve "${{A[@]}}" {OURS}', ()),
    "behind the model": (f'A=(-tp 4)\nvllm serve org/m "${{A[@]}}" {OURS}', ()),
    "as an option's value": (f'A=(8000 -tp 4)\nvllm serve org/m --port "${{A[@]}}" {OURS}', ()),
    "part of a list": (f'A=(x -tp 4)\nvllm serve org/m --port 1 "${{A[@]:1}}" {OURS}', ()),
    "part of the arguments": (f'vllm serve "${{@:2}}" {OURS}', ("bash", "x", "org/m", "-tp", "4")),
}


@pytest.mark.parametrize(("script", "words"), LISTS.values(), ids=LISTS.keys())
def test_list_in_double_quotes_may_hold_a_tp(script: str, words: tuple[str, ...]) -> None:
    """B23: `"${A[@]}"` is any number of words, so an option that is not seen is unknown, never 1."""
    pool = pool_p1(prefill={"tensorParallelSizes": [4, 1]})
    assert refused(script_pod(script, *words), pool).code == "TPUnknown"
    declared = annotated(script_pod(script, *words), tensor_parallel_size="4")
    assert injected(declared, pool).record.local_tp == 4


def test_script_with_its_own_assignment_does_not_use_the_container_variable() -> None:
    """What the script sets itself overrides the environment."""
    env = [{"name": "TP", "value": "2"}]
    assert injected(script_pod(f"vllm serve org/m -tp $TP {OURS}", env=env)).record.local_tp == 2
    assert refused(script_pod(f"TP=4; vllm serve org/m -tp $TP {OURS}", env=env)).code == "TPUnknown"


@pytest.mark.parametrize(
    "change",
    [
        "let TP*=2", "((TP*=2))", "((TP = 4))", "((++TP))", "printf -v TP 4", "getopts t: TP", "export $(cat /etc/env)",
        'while read -r l; do export "$l"; done </etc/env', "for n in TP; do export $n=4; done", "source /etc/env",
        '. "$ENVIRONMENT"', 'eval "$(cat /etc/env)"', 'eval "export TP=4"', "if x; then eval 'A=1; TP=4'; fi",
    ],
)  # fmt: skip
def test_variable_that_a_script_computes_is_unknown(change: str) -> None:
    """B23: what the container says about a variable holds only while the script leaves it alone."""
    pod = script_pod(f"{change}\nvllm serve org/m -tp $TP {OURS}", env=[{"name": "TP", "value": "2"}])
    assert refused(pod).code == "TPUnknown"


@pytest.mark.parametrize(
    "script",
    [
        "vllm serve org/m ${MORE:-$OTHER}", 'vllm serve org/m ${MORE:-"-tp" 4}',
        ": ${MORE:=-tp 4}; vllm serve org/m $MORE",
        "vllm serve org/m ${MORE:=-tp $N}", "vllm serve org/m ${UNSET-$OTHER}", "vllm serve org/m -tp ${LONG: -1}",
    ],
)  # fmt: skip
def test_what_takes_the_place_of_an_empty_variable_may_hold_a_tp(script: str) -> None:
    """B23: an empty value is not the end of it where the script has a default that is computed or kept."""
    env = [{"name": "MORE", "value": ""}, {"name": "OTHER", "value": "-tp 4"}, {"name": "LONG", "value": "12"}]
    pool = pool_p1(prefill={"tensorParallelSizes": [4, 1]})
    assert refused(script_pod(f"{script} {OURS}", env=env), pool).code == "TPUnknown"


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("vllm serve org/m -tp ${TP:-$OTHER}", 2), (": ${TP:=4}; vllm serve org/m -tp $TP", 2),
        ("vllm serve org/m -tp ${UNSET:=4}", 4), ("vllm serve org/m ${MORE-x} -tp ${TP:?is needed}", 2),
        (". /opt/venv/bin/activate && vllm serve org/m -tp $TP", 2),
        ("source $VENV/bin/activate; vllm serve org/m -tp $TP", 2),
        ('eval "vllm serve org/m --port $(x) -tp $TP"', 2),
    ],
)  # fmt: skip
def test_variable_that_stays_what_it_is_is_read(script: str, size: int) -> None:
    """B23: a default beside a value that counts, and a virtual environment, change nothing."""
    env = [{"name": "TP", "value": "2"}, {"name": "MORE", "value": ""}]
    script = script.replace('TP"', f'TP {OURS}"') if script.startswith("eval") else f"{script} {OURS}"
    assert injected(script_pod(script, env=env)).record.local_tp == size


def test_variable_that_env_sets_in_front_of_a_shell_is_not_the_containers() -> None:
    """B13, B23: `env TP=4 bash -c ...`; what `env` removes is gone as well."""
    env = [{"name": "TP", "value": "2"}]
    for prefix in (["env", "TP=4"], ["env", "-u", "TP"], ["tini", "--", "env", "TP=$(TP)4"]):
        pod = pod_p0(command=[*prefix, "bash", "-c", f"vllm serve org/m -tp $TP {OURS}"], args=None, env=env)
        assert refused(pod).code == "TPUnknown"
    others = pod_p0(command=["env", "A=4", "bash", "-c", f"vllm serve org/m -tp $TP {OURS}"], args=None, env=env)
    assert injected(others).record.local_tp == 2


@pytest.mark.parametrize("strict", ["set -u", "set -euo pipefail", "set -e -o nounset", "set -o pipefail -u"])
@pytest.mark.parametrize("start", ["exec vllm serve org/m -tp 2", "./start.sh"])
def test_strict_script_is_told_to_start_without_us_as_well(strict: str, start: str) -> None:
    """A pod that is left as it was must start: `set -u` stops at a variable that only injected pods have."""

    def told(script: str) -> list[str]:
        pod = annotated(script_pod(script), tensor_parallel_size="2")
        return [text for text in injected(pod).warnings if "${KVSHARE_VLLM_ARGS:-}" in text]

    assert len(told(f"{strict}\n{start} {OURS}")) == 1
    assert len(told(f'{strict}\neval "{start} {OURS}"')) == 1
    assert not told(f"{strict}\n{start} ${{KVSHARE_VLLM_ARGS:-}}")
    assert not told(f"set -e; set -o pipefail; echo set -u; {start} {OURS}")


FACTS: dict[str, Any] = {
    "an address": {"fieldRef": {"fieldPath": "status.podIP"}},
    "a label, as LeaderWorkerSet numbers its pods": {"fieldRef": {"fieldPath": "metadata.labels['index']"}},
    "a number": {"resourceFieldRef": {"resource": "limits.cpu"}},
}


@pytest.mark.parametrize("source", FACTS.values(), ids=FACTS.keys())
def test_fact_about_the_pod_in_a_script_leaves_it_readable(source: Any) -> None:
    """B11, B37: it can hold nothing that a shell would take for more than a word; as a TP it is unknown."""
    env = [{"name": "FACT", "valueFrom": source}]
    assert injected(script_pod(f"vllm serve org/m -tp 2 --host $(FACT) {OURS}", env=env)).record.local_tp == 2
    assert refused(script_pod(f"vllm serve org/m -tp $(FACT) {OURS}", env=env)).code == "TPUnknown"
    assert injected(script_pod(f"vllm serve org/m -tp 2 --host $(X_SERVICE_HOST) {OURS}"))


@pytest.mark.parametrize(
    ("given", "meant"), [("$(hostname)", "$$(hostname)"), ("$(A)", "${A}"), ("$(NOTE)", "${NOTE}")]
)
def test_script_into_which_kubernetes_may_put_any_text_says_how_to_write_it(given: str, meant: str) -> None:
    """B11: what envFrom or a reference may hold is no script that can be read; the remedy works."""
    fields: dict[str, Any] = {
        "envFrom": [{"secretRef": {"name": "s"}}],
        "env": [
            {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            {"name": "NOTE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['a']"}}},
        ],
    }
    answer = refused(script_pod(f"vllm serve org/m -tp 2 {OURS} --host {given}", **fields))
    assert (answer.code, meant in answer.message) == ("ShellWrapper", True)
    assert injected(
        annotated(script_pod(f"vllm serve org/m {OURS} --host {meant}", **fields), tensor_parallel_size="2")
    )


MISMATCHES: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "a TP size that is not listed": (["-tp", "8"], {}, "TPNotInPool"),
    "no TP option means 1, which is not listed": ([], {}, "TPNotInPool"),
    "a PP size that is not listed": (["-tp", "2", "--pipeline-parallel-size", "2"], {}, "PPMismatch"),
    "decode context parallel": (["-tp", "2", "-dcp", "2"], {}, "ContextParallel"),
    "prefill context parallel": (["-tp", "2", "-pcp", "2"], {}, "ContextParallel"),
    "another block size": (["-tp", "2", "--block-size", "32"], {}, "BlockMismatch"),
    "another hash": (["-tp", "2", "--prefix-caching-hash-algo=sha256"], {}, "FlagConflict"),
    "another KV dtype": (["-tp", "2", "--kv-cache-dtype=fp8"], {"cache": {"dtype": "auto"}}, "DtypeMismatch"),
    "a KV dtype that is missing": (["-tp", "2"], {"cache": {"dtype": "fp8"}}, "DtypeMismatch"),
    "no prefix caching": (["-tp", "2", "--no-enable-prefix-caching"], {}, "FlagConflict"),
    "KV offloading": (["-tp", "2", "--kv-offloading-size", "8"], {}, "FlagConflict"),
    "a connector, abbreviated, with a blank": (["-tp", "2", '--kv-transfer={"kv_connector": "X"}'], {}, "FlagConflict"),
    "settings of a connector with a blank": (
        ["-tp", "2", '--kv-transfer-config.kv_connector_extra_config={"a": 1}'],
        {},
        "FlagConflict",
    ),
    "several nodes in one word": (["-tp", "2", "-n 2"], {}, "MultiNodeUnsupported"),
    "another revision": (
        ["-tp", "2", "--revision", "b"],
        {"model": {"name": "org/m", "revision": "a"}},
        "ModelMismatch",
    ),
    "no revision": (["-tp", "2"], {"model": {"name": "org/m", "revision": "a"}}, "ModelMismatch"),
    "a user's own connector": (
        ["-tp", "2", "--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'],
        {},
        "FlagConflict",
    ),
    "a user's own connector, abbreviated": (["-tp", "2", "--kv-tr={}"], {}, "FlagConflict"),
    "a user's own dotted connector": (
        ["-tp", "2", "--kv_transfer_config.kv_connector", "NixlConnector"],
        {},
        "FlagConflict",
    ),
}


@pytest.mark.parametrize(("args", "spec", "reason"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_setting_that_differs_from_the_pool_is_refused(args: list[str], spec: dict[str, Any], reason: str) -> None:
    """B18, B24: each difference has its own reason."""
    assert refused(pod_p0(args=args), pool_p1(**spec)).code == reason


UNSEEN = {
    "--decode-context-parallel-size": "decode-context-parallel size",
    "-pcp": "prefill-context-parallel size",
    "--block-size": "block size",
    "--kv-cache-dtype": "KV-cache dtype",
    "--revision": "revision",
    "--prefix-caching-hash-algo": "prefix hash",
    "-pp": "pipeline-parallel size",
}


@pytest.mark.parametrize("flag", UNSEEN)
def test_setting_that_cannot_be_seen_is_said(flag: str) -> None:
    """B24: what decides bytes and comes by reference could not be compared; the author hears which it was."""
    pool = pool_p1(model={"name": "org/m", "revision": "a", "kvHeads": 8}, cache={"dtype": "auto"})
    env = [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]
    outcome = injected(pod_p0(args=["-tp", "2", "--revision", "a", f"{flag}=$(X)"], env=env), pool)
    (said,) = [warning for warning in outcome.warnings if "could not be read" in warning]
    assert said.endswith(f": {UNSEEN[flag]}")


def test_another_model_is_refused_and_a_listed_path_is_not() -> None:
    """Local paths mean the pool's weights only when the pool says so."""
    pod = pod_p0(command=["vllm", "serve", "/mnt/models/"])
    assert refused(pod).code == "ModelMismatch"
    assert injected(pod, pool_p1(model={"name": "org/m", "paths": ["/mnt/models"]}))
    assert refused(pod_p0(command=["vllm", "serve"], args=["-tp", "2"])).code == "ModelMismatch"


def test_equal_settings_are_kept_and_not_added_again() -> None:
    """A block size and hash that already agree stand once."""
    args = ["-tp", "2", "--block-size", "16", "--prefix-caching-hash-algo", "sha256_cbor"]
    added = engine_of(injected(pod_p0(args=args)))["args"][len(args) :]
    assert all(word.startswith("--kv-transfer-config.") for word in added)


def test_group_worker_gets_code_and_a_record_but_no_flags() -> None:
    """B28: the leader carries the configuration; the engine's code runs on workers as well."""
    script = "ray start --address=leader:6379 --block"
    for pod in (script_pod(script), script_pod("vllm serve org/m")):
        if "ray" not in pod["spec"]["containers"][0]["args"][0]:
            pod["metadata"]["labels"] = {"leaderworkerset.sigs.k8s.io/worker-index": "1"}
        outcome = injected(pod)
        container = engine_of(outcome)
        assert outcome.record.role == "worker"
        assert not flags_of(container)
        assert names.ARGS_VARIABLE not in variables(container)
        assert variables(container)["PYTHONPATH"] == "/opt/kvshare"


ANNOTATIONS: dict[str, tuple[dict[str, str], str]] = {
    "an unknown role": ({"role": "encode"}, "RoleInvalid"),
    "a TP that is no number": ({"tensor_parallel_size": "two"}, "AnnotationInvalid"),
    "a TP of more digits than Python reads": ({"tensor_parallel_size": "1" * 5000}, "AnnotationInvalid"),
    "a TP above all bounds": ({"tensor_parallel_size": "1025"}, "AnnotationInvalid"),
    "a TP of zero": ({"tensor_parallel_size": "0"}, "AnnotationInvalid"),
    "a TP against the command line": ({"tensor_parallel_size": "4"}, "AnnotationInvalid"),
    "an unknown entrypoint": ({"entrypoint": "yes"}, "AnnotationInvalid"),
    "a container that does not exist": ({"container": "other"}, "ContainerNotFound"),
}


@pytest.mark.parametrize(("annotations", "reason"), ANNOTATIONS.values(), ids=ANNOTATIONS.keys())
def test_annotation_that_means_nothing_is_refused(annotations: dict[str, str], reason: str) -> None:
    """Annotations are free text; the refusal names what is allowed."""
    assert refused(annotated(pod_p0(), **annotations)).code == reason


def test_role_decides_vllms_role_and_the_allowed_sizes() -> None:
    """A decode pod may not use a prefill-only size."""
    decode = engine_of(injected(annotated(pod_p0(), role="decode")))["args"]
    assert "--kv-transfer-config.kv_role=kv_consumer" in decode
    assert refused(annotated(pod_p0(args=["-tp", "4"]), role="decode")).code == "TPNotInPool"
    assert injected(annotated(pod_p0(args=["-tp", "4"]), role="prefill"))


def test_engine_container_is_found_among_others() -> None:
    """A sidecar does not matter; two engines need the annotation; none at all is said."""
    pod = pod_p0()
    pod["spec"]["containers"].insert(0, {"name": "proxy", "image": "envoy", "command": ["envoy"]})
    assert injected(pod).record.container == "vllm"
    second = {**pod_p0()["spec"]["containers"][0], "name": "vllm-2"}
    pod["spec"]["containers"].append(second)
    assert refused(pod).code == "ContainerAmbiguous"
    assert injected(annotated(pod, container="vllm-2")).record.container == "vllm-2"
    pod["spec"]["containers"] = [{"name": "a", "image": "x", "command": ["a"]}, {"name": "b", "command": ["b"]}]
    assert refused(pod).code == "ContainerNotFound"
