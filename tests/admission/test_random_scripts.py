"""Scripts put together at random, read by the injection and run by the shell itself with a stub `vllm`.

Where the injection says that its flags get in, they must arrive whole in every `vllm` that the script starts, with our
folder in PYTHONPATH, and the TP size that was read must be the one that arrives.
"""

from __future__ import annotations

import pathlib
import random
import subprocess
from typing import Any

import pytest

from kvshare_operator.api import names
from kvshare_operator.core.commandline.reading import Opening, Reading, read_container

SCRIPTS = 250
FLAGS = ("--kv-transfer-config.a=1", "--kv-transfer-config.b=s:x/y", "--block-size=16")
OURS = f"${names.ARGS_VARIABLE}"
BEFORE = (
    "", "set -euo pipefail\n", "set -x;", "export A=1 B=2;", "TP=4;", ": ${TP:=4};", "if true; then :; fi;", "x a;",
    "# comment 'quote\n", "cat <<E >/dev/null\n$TP \"x\nE\n", "f() { x; }; f;", "case $TP in 2) M=a;; *) M=z;; esac;",
    "IFS=' ';", "IFS=$'\\n\\t';", "A=(1 -tp 5);", "let TP=3;", "((TP=3));", "((TP++));", "for i in 1; do x $i; done;",
    "shift 0;", "set -- $@;", "unset TP;", "export TP=3;", "[ -n \"${1:-}\" ] && exit 0;", "A=$(echo 1);",
    "eval 'TP=3';",
    "printf -v TP 3;", "{ x; };", "(TP=3);", "x \\\n y;", "declare -i TP=3;", "TP+=1;", "x && TP=7 || TP=8;",
    "test $# -eq 0 || exit 0;", "export PYTHONPATH=/a;", "export PYTHONPATH=$PYTHONPATH:/a;", "PYTHONPATH=/a x;",
    "PYTHONPATH=/a${PYTHONPATH:+:$PYTHONPATH};", "unset PYTHONPATH;",
    "for a in \"$@\"; do test $a = zero || exit 0; done;",
    "M=${1:-org/m};", "while IFS= read -r l; do x; done </dev/null;", "export $(echo TP=3);",
)  # fmt: skip
STARTS = (
    "vllm serve org/m -tp $TP", "exec vllm serve org/m -tp $TP", 'vllm serve org/m -tp "$TP"', "vllm serve $M -tp 2",
    "vllm serve org/m --tensor-parallel-size=$TP", "vllm serve org/m -tp ${TP:-9}", "env Z=1 vllm serve org/m -tp $TP",
    "Z=1 vllm serve org/m -tp $TP", "nohup vllm serve org/m -tp $TP", "vllm serve org/m \\\n -tp $TP", "x; vllm serve",
    "vllm serve org/m $A", "vllm serve org/m -tp $((1+1))", 'vllm serve org/m "${A[@]}"', 'vllm serve "${A[@]}"',
    "vllm serve org/m -tp ${TP%x}", "vllm serve org/m -tp 1 -tp $TP", "TP=6 vllm serve org/m -tp $TP",
    "eval vllm serve org/m -tp $TP", "env PYTHONPATH=/a vllm serve org/m", "env -u PYTHONPATH vllm serve org/m",
    "env PYTHONPATH=/a:$PYTHONPATH vllm serve org/m", "vllm serve org/m -tp 2 --",
)  # fmt: skip
REFERENCES = (
    f" {OURS}", " ${KVSHARE_VLLM_ARGS}", ' "$@"', " $@", f' "{OURS}"', f" '{OURS}'", f" x{OURS}", f" {OURS} --port 1",
    f" \\\n {OURS}", f" # {OURS}", "", " ${KVSHARE_VLLM_ARGS:-}", ' "${@}"', f" $'a' {OURS}", f" {OURS}{OURS}",
    ' "${@:2}"',
)  # fmt: skip
ENDS = ("", " &\nwait", " | cat", " 2>&1", " > /dev/null", "; x", "\n", " || exit 1", " && x")
STUB = (
    '#!/bin/sh\nfor word in "$PYTHONPATH" "$@"; do printf \'%s\\0\' "$word"; done >>"$OUT"; printf \'\\1\' >>"$OUT"\n'
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with stubs of `vllm` and of a program `x`."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in {"vllm": STUB, "x": "#!/bin/sh\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def started(place: pathlib.Path, command: list[str], variables: dict[str, str]) -> list[list[str]]:
    """PYTHONPATH and arguments of every `vllm` that a command starts."""
    out = place / "out"
    out.write_text("")
    environment = {"PATH": f"{place}:/usr/bin:/bin", "TP": "2", "OUT": str(out), "PYTHONPATH": "/opt/kvshare"}
    subprocess.run(command, env={**environment, **variables}, cwd=place, capture_output=True, check=False, timeout=30)
    return [run.split("\0")[:-1] for run in out.read_text().split("\1")[:-1]]


def tp_of(words: list[str]) -> str | None:
    """The TP size that vLLM's parser would take."""
    found = None
    for number, word in enumerate(words):
        if word in ("-tp", "--tensor-parallel-size") and number + 1 < len(words):
            found = words[number + 1]
        elif word.startswith("--tensor-parallel-size="):
            found = word.partition("=")[2]
    return found


def test_what_is_read_in_a_script_is_what_the_shell_does(place: pathlib.Path) -> None:
    """B11, B12x, B23, B29, F6: no flag torn or lost, no TP misread, no folder hidden."""
    chance = random.Random(11)
    arrived = 0
    for _ in range(SCRIPTS):
        before = "".join(chance.choice(BEFORE) for _ in range(chance.randrange(3)))
        script = before + chance.choice(STARTS) + chance.choice(REFERENCES) + chance.choice(ENDS)
        command = [chance.choice(("bash", "bash", "sh")), "-c"]
        args = [script, *chance.choice(([], ["zero"], ["zero", "--port", "80"]))]
        container: dict[str, Any] = {"name": "c", "command": command, "args": args}
        container["env"] = [{"name": "TP", "value": "2"}]
        reading = read_container(container, Opening())
        if not isinstance(reading, Reading) or reading.loses("PYTHONPATH", names.PAYLOAD_PATH):
            continue
        added = [*reading.filler, *FLAGS] if reading.way == "args" else []
        variables = {names.ARGS_VARIABLE: " ".join(FLAGS)} if reading.way == "variable" else {}
        runs = started(place, [*command, *args, *added], variables)
        if not runs:  # a script that breaks off does so without us as well
            assert not started(place, [*command, *args], dict.fromkeys(variables, "")), script
        for folder, *words in runs:
            arrived += 1
            assert [word for word in words if word in FLAGS] == list(FLAGS), script
            assert names.PAYLOAD_PATH in folder.split(":"), script
            seen = reading.arguments.get("--tensor-parallel-size")
            assert seen.unknown is not None or seen.text == tp_of(words), script
    assert arrived > SCRIPTS // 8
