"""Shell forms, run for real: the injected container's command with a stub `vllm` that prints its arguments.

What the reader says about a script must be what a shell does with it.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from kvshare_operator.core.injection.inject import Injected
from pods import Json, engine_of, flags_of, injected, pod_p0, pool_p1, run, script_pod

STUB = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


@pytest.fixture
def programs(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a stub vllm, first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "vllm").write_text(STUB)
    (folder / "vllm").chmod(0o755)
    return folder


def what_vllm_gets(container: Json, programs: pathlib.Path) -> list[list[str]]:
    """Run a container's command; return the arguments of every `vllm` that it started."""
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    for entry in container.get("env") or []:
        environment[entry["name"]] = entry["value"]
    words = [*container["command"], *(container.get("args") or [])]
    finished = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20, check=False)
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("[")]


def intended(pod: Json) -> list[str]:
    """The flags that a plain command line gets, which the script must pass on unchanged."""
    del pod
    return flags_of(engine_of(injected(pod_p0())))


SCRIPTS = {
    "llm-d: multi-line with exports": (
        'export A=1\nset -e\nif [ -n "$A" ]; then echo ok >&2; fi\n'
        "exec vllm serve org/m \\\n  --tensor-parallel-size 2 \\\n  --port 8000 \\\n  $KVSHARE_VLLM_ARGS\n"
    ),
    "KServe: eval with further words": 'eval "vllm serve org/m --tensor-parallel-size 2 ${EXTRA} $@"',
    "KServe: eval with our variable": 'eval "vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"',
    "LWS leader: background work first": "sleep 0 & vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS; wait",
    "production-stack: exec of words": 'exec vllm serve org/m -tp 2 "$@"',
    "unquoted words": "vllm serve org/m -tp 2 $@",
    "pipe and redirection": "vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS 2>/dev/null | cat",
    "function": "run() { vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS; }\nrun",
    "loop": "for i in 1; do vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS; done",
    "case": "case x in x) vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS;; esac",
    "here-document before": 'cat <<E >/dev/null\nit\'s "text"\nE\nvllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS',
    "comment with a quote": "# don't\nvllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
    "value in quotes": 'vllm serve \'org/m\' -tp "2" --served-model-name "a b" ${KVSHARE_VLLM_ARGS}',
    "variable of the container": "vllm serve org/m -tp $TP $KVSHARE_VLLM_ARGS",
}


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_flags_reach_vllm_untorn(script: str, shell: str, programs: pathlib.Path) -> None:
    """B11, B12x, F6: every intended flag is one argument of vllm, once; the user's own arguments are still there."""
    env = [{"name": "EXTRA", "value": "--enforce-eager"}, {"name": "TP", "value": "2"}]
    pod = script_pod(script, shell=shell, env=env)
    outcome = injected(pod)
    assert outcome.record.local_tp == 2
    (arguments,) = what_vllm_gets(engine_of(outcome), programs)
    assert arguments[:2] == ["serve", "org/m"]
    assert [word for word in arguments if word.startswith("--kv-transfer-config.")] == intended(pod)
    assert "--block-size=16" in arguments


NEVER = {
    "single quotes": "vllm serve org/m -tp 2 '$KVSHARE_VLLM_ARGS'",
    "double quotes": 'vllm serve org/m -tp 2 "$KVSHARE_VLLM_ARGS"',
    "escaped": "vllm serve org/m -tp 2 \\$KVSHARE_VLLM_ARGS",
    "comment": "vllm serve org/m -tp 2 #$KVSHARE_VLLM_ARGS",
    "quoted here-document": "cat <<'E' >/dev/null\n$KVSHARE_VLLM_ARGS\nE\nvllm serve org/m -tp 2",
    "no reference": "vllm serve org/m -tp 2",
    "joined words": 'vllm serve org/m -tp 2 "$*"',
}


@pytest.mark.parametrize("script", NEVER.values(), ids=NEVER.keys())
def test_refused_scripts_would_indeed_not_have_passed_the_flags(script: str, programs: pathlib.Path) -> None:
    """B12x: the refusal is not mere caution: run with the variable set, vllm gets no usable flag."""
    assert not isinstance(run(script_pod(script)), Injected)
    flags = "--kv-transfer-config.kv_connector=A --block-size=16"
    env = [{"name": "KVSHARE_VLLM_ARGS", "value": flags}]
    container: Json = {"command": ["bash", "-c", script], "args": ["x", *flags.split()], "env": env}
    (arguments,) = what_vllm_gets(container, programs)
    assert "--kv-transfer-config.kv_connector=A" not in arguments


def test_kserve_json_in_a_variable_reaches_vllm_beside_our_flags(programs: pathlib.Path) -> None:
    """B26: eval strips quotes of a JSON value; ours have none."""
    script = 'eval "vllm serve org/m -tp 2 ${VLLM_ADDITIONAL_ARGS} $@"'
    env = [{"name": "VLLM_ADDITIONAL_ARGS", "value": "--hf-overrides '{\"a\": 1}'"}]
    (arguments,) = what_vllm_gets(engine_of(injected(script_pod(script, env=env), pool_p1())), programs)
    assert '{"a": 1}' in arguments
    assert "--kv-transfer-config.kv_role=kv_both" in arguments
