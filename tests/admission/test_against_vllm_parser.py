"""The command-line reader against the installed vLLM's own parser, on generated command lines.

Where vLLM accepts a line, both must agree on every watched option, or the reader must say "unknown".
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pathlib
import random
import shlex
import subprocess
import sys
import warnings
from typing import Any

import pytest

from kvshare_operator.core.commandline import flags, vllm_flags
from kvshare_operator.core.commandline.reading import Opening, Reading, read_container

pytestmark = pytest.mark.engine

DESTINATIONS = {
    "--tensor-parallel-size": ("tensor_parallel_size", 1),
    "--pipeline-parallel-size": ("pipeline_parallel_size", 1),
    "--decode-context-parallel-size": ("decode_context_parallel_size", 1),
    "--prefill-context-parallel-size": ("prefill_context_parallel_size", 1),
    "--block-size": ("block_size", None),
    "--kv-cache-dtype": ("kv_cache_dtype", "auto"),
    "--dtype": ("dtype", "auto"),
    "--revision": ("revision", None),
    "--prefix-caching-hash-algo": ("prefix_caching_hash_algo", "sha256"),
    "--nnodes": ("nnodes", 1),
}
LINES = 800


@pytest.fixture(scope="module")
def vllm_parser() -> Any:
    """`vllm serve`'s parser as the program builds it. Importing vLLM takes a while."""
    with warnings.catch_warnings():  # vLLM's own imports warn
        warnings.simplefilter("ignore")
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    top = FlexibleArgumentParser(prog="vllm")
    make_arg_parser(top.add_subparsers(dest="subparser").add_parser("serve"))
    return top


@pytest.fixture(scope="module")
def module_parser(vllm_parser: Any) -> Any:
    """The parser of `python -m vllm.entrypoints.openai.api_server`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    return make_arg_parser(type(vllm_parser)(prog="api_server"))


def option_table(parser: Any) -> dict[str, int | None]:
    """Every option's first spelling -> number of values, from vLLM's parser."""
    (action,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    serve: Any = action.choices["serve"]
    return {
        one.option_strings[0]: (0 if one.nargs == 0 else 1 if one.nargs in (None, "?") else None)
        for one in serve._actions
        if one.option_strings
    }


def test_table_of_options_is_vllms(vllm_parser: Any) -> None:
    """Spellings and arities; an option that vLLM adds must be added to the table."""
    assert option_table(vllm_parser) == vllm_flags.ARITY


def spelled(rng: random.Random, option: str) -> str:
    """One of the spellings that vLLM may take for ``option``."""
    short = [name for name in vllm_flags.CANONICAL if vllm_flags.CANONICAL[name] == option and name[1] != "-"]
    choice = rng.random()
    if short and choice < 0.3:
        return rng.choice(short)
    if choice < 0.5:
        return "--" + option[2:].replace("-", "_")
    if choice < 0.6:
        return option[: rng.randrange(5, len(option))]
    return option


def piece(rng: random.Random) -> list[str]:
    """One option with its values, or something that stands among options."""
    watched = {
        "--tensor-parallel-size": ["1", "2", "4", "+4", " 8", "1_0", "02"],
        "--pipeline-parallel-size": ["1", "2"],
        "--decode-context-parallel-size": ["1", "2"],
        "--block-size": ["16", "32"],
        "--kv-cache-dtype": ["auto", "fp8"],
        "--dtype": ["auto", "bfloat16"],
        "--revision": ["main", "abc"],
        "--prefix-caching-hash-algo": ["sha256", "sha256_cbor"],
    }
    others = [
        ["--enforce-eager"], ["--no-enable-prefix-caching"], ["-O3"], ["-O", "2"], ["--port", "8001"], ["--port=8001"],
        ["--served-model-name", "a", "b"], ["--max-model-len", "-1"], ["--seed", "-3"], ["-q", "fp8"], ["-n", "2"],
        ["-r1"], ["--hf-overrides", "{}"], ["--kv-transfer-config.kv_role", "kv_both"],
        ["--kv_transfer_config.kv_connector=X"], ["--speculative-config.num_speculative_tokens", "3"],
        ["--api-key", "k1", "k2"], ["--trust-remote-code"], ["--max-num-seqs=8"], ["-dp", "2"], ["--hf-token", "t"],
        ["--generation-config", "a.b"], ["-cc.mode=3"], ["--hf-overrides.rope_theta", "5"], ["-asc", "2"], ["-dpl=1"],
        ["--compilation-config.cudagraph_mode=NONE"], ["--hf_overrides", '{"a": 1}'], ["-ep"], ["--no-enable-lora"],
        ["--speculative-config", '{"num_speculative_tokens": 2}'], ["--lora-modules", "a=b", "c=d"], ["-pcp", "1"],
        ["--cudagraph-capture-sizes", "1", "2", "4"], ["--limit-mm-per-prompt.image", "2"],
        ["--uvicorn-log-level=info"], ["--async-scheduling"], ["--override-generation-config", "{}"],
        ["--stream-interval", "-1"], ["--seed=-1"], ["-n 2"], ["-O=1 2"], ['--hf-over={"a": 1}'],
        ['--kv-transfer-config.kv_connector_extra_config={"a": 1}'], ['--kv_transfer={"kv_connector": "X"}'],
    ]  # fmt: skip
    if rng.random() < 0.5:
        return list(rng.choice(others))
    option = rng.choice(list(watched))
    name, value = spelled(rng, option), rng.choice(watched[option])
    return [f"{name}={value}"] if rng.random() < 0.4 else [name, value]


def line(seed: int) -> list[str]:
    """A command line behind `vllm`."""
    rng = random.Random(seed)
    words = [word for _ in range(rng.randrange(6)) for word in piece(rng)]
    how = rng.random()
    if how < 0.7:
        return ["serve", "org/m", *words]
    if how < 0.85:
        return ["serve", *words, "--model", "org/m", *piece(rng)]
    return ["serve", "--model=org/m", *words, "--model", "org/other"]


def parsed_by_vllm(parser: Any, words: list[str]) -> argparse.Namespace | None:
    """What vLLM makes of a line; None when it refuses it."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit, ValueError, TypeError, IndexError):
        found: argparse.Namespace = parser.parse_args(list(words))
        return found
    return None


def assert_agree(theirs: argparse.Namespace, ours: flags.Arguments, words: list[str]) -> None:
    """On every watched option ours has vLLM's value, or says that it is unknown.

    What may stand in a `--config` file is unknown as well, unless the command line has it.
    """
    in_file = ours.get("--config").present
    for option, (destination, default) in DESTINATIONS.items():
        seen = ours.get(option)
        if seen.unknown is not None or (in_file and not seen.given):
            continue
        value: Any = seen.text if seen.given else default
        if isinstance(getattr(theirs, destination), int):
            value = seen.number() if seen.given else default
        assert value == getattr(theirs, destination), f"{option} in {words}"
    configured = ours.get("--kv-transfer-config")
    if not in_file and configured.unknown is None:
        dotted = any(flag.option == "--kv-transfer-config" for flag in ours.dotted)
        assert (configured.given or dotted) == (theirs.kv_transfer_config is not None), words
    model = getattr(theirs, "model_tag", None) or theirs.model
    named = ours.get("--model")
    if named.unknown is None and (named.given or not in_file):
        assert (named.text or "Qwen/Qwen3-0.6B") == model, words
    asked = ours.get("--enable-prefix-caching")
    if asked.unknown is None and (asked.given or not in_file):
        wanted = {None: None, "--no-enable-prefix-caching": False}.get(asked.text, True)
        assert theirs.enable_prefix_caching == wanted, words


@pytest.mark.filterwarnings("ignore")
def test_both_readers_agree_or_ours_says_unknown(vllm_parser: Any) -> None:
    """B24: hundreds of lines, most of which vLLM accepts."""
    accepted = 0
    for seed in range(LINES):
        words = line(seed)
        theirs = parsed_by_vllm(vllm_parser, words)
        if theirs is not None:
            accepted += 1
            assert_agree(theirs, flags.read(words[1:], serve=True), words)
    assert accepted > LINES // 2


@pytest.mark.filterwarnings("ignore")
def test_both_agree_on_the_module_that_vllms_image_starts(module_parser: Any) -> None:
    """`python -m vllm.entrypoints.openai.api_server` has no positional model, and the last `--model` wins there."""
    accepted = 0
    for seed in range(LINES):
        rng = random.Random(-seed - 1)
        words = [word for _ in range(rng.randrange(6)) for word in piece(rng)]
        words += ["--model", "org/m"] if rng.random() < 0.8 else ["--model=org/a", *piece(rng), "--model", "org/b"]
        theirs = parsed_by_vllm(module_parser, words)
        if theirs is None:
            continue
        accepted += 1
        assert_agree(theirs, flags.read(words, serve=False), words)
        started = ["python3", "-m", "vllm.entrypoints.openai.api_server", *words]
        reading = read_container({"name": "c", "command": started}, Opening())
        assert isinstance(reading, Reading)
        assert_agree(theirs, reading.arguments, words)
    assert accepted > LINES // 2


@pytest.mark.filterwarnings("ignore")
def test_both_agree_beside_a_config_file(vllm_parser: Any, tmp_path: pathlib.Path) -> None:
    """B23: the file's content is never guessed; what stands on the command line wins over it."""
    file = tmp_path / "vllm.yaml"
    file.write_text("tensor-parallel-size: 4\nblock-size: 32\nport: 8001\nkv-cache-dtype: fp8\nenforce-eager: true\n")
    accepted = 0
    for seed in range(LINES // 2):
        rng = random.Random(seed)
        words = line(seed)
        config = rng.choice([["--config", str(file)], [f"--config={file}"]])
        place = rng.randrange(2, len(words) + 1)
        theirs = parsed_by_vllm(vllm_parser, [*words[:place], *config, *words[place:]])
        if theirs is not None:
            accepted += 1
            assert_agree(theirs, flags.read([*words[1:place], *config, *words[place:]], serve=True), words)
    assert accepted > LINES // 10


WRAPPERS = (
    "{line}",
    "exec {line}",
    "export A=1; {line}",
    'set -e\nif [ -n "$HOME" ]; then\n  exec {line}\nfi',
    "cat > /dev/null <<EOF\nvllm serve other -tp 8\nEOF\n{line}",
    "cat > /dev/null <<'EOF'\nvllm serve other -tp 8\nEOF\n{line} # -tp 9",
    "env A=b VLLM_LOGGING_LEVEL=DEBUG {line}",
    "VLLM_USE_V1=1 {line}",
    "sleep 0 & {line} 2>&1 | cat; wait",
    "sh -c '{line}'",
    'bash -ec "{line}"',
    "run() {{ {line}; }}; run",
    'eval "{line}"',
    "TP=8; {line} -tp $TP",
    "{line} -tp $PODS_TP",
    "{line} -tp ${{MISSING:-2}}",
    "{line} $(echo -tp 2)",
    "for tp in 2; do {line} -tp $tp; done",
    "python3 -m json.tool </dev/null; {line}",
)


@pytest.mark.filterwarnings("ignore")
def test_scripts_agree_with_what_a_shell_hands_to_vllm(vllm_parser: Any, tmp_path: pathlib.Path) -> None:
    """B11, F6: each line in a shell script, run by bash with a stub; vLLM's parser reads what the stub got."""
    stub = tmp_path / "vllm"
    stub.write_text(f"#!{sys.executable}\nimport json, sys\nprint('ARGV' + json.dumps(sys.argv[1:]))\n")
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/tmp", "PODS_TP": "4"}
    env = [{"name": name, "value": value} for name, value in environment.items()]
    read = 0
    for seed in range(LINES // 4):
        wrapper = WRAPPERS[seed % len(WRAPPERS)]
        quote = shlex.join if "'{" not in wrapper and '"{' not in wrapper else " ".join
        script = wrapper.format(line=quote(["vllm", *line(seed)]))
        ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
        given = [json.loads(text[4:]) for text in ran.stdout.splitlines() if text.startswith("ARGV")]
        container = {"name": "c", "command": ["bash", "-c", f"{script} $KVSHARE_VLLM_ARGS"], "env": env}
        answer = read_container(container, Opening())
        if not isinstance(answer, Reading) or len(given) != 1:
            continue
        theirs = parsed_by_vllm(vllm_parser, given[0])
        if theirs is not None:
            read += 1
            assert_agree(theirs, answer.arguments, [script])
    assert read > LINES // 16


@pytest.mark.filterwarnings("ignore")
def test_injected_flags_are_parsed_by_vllm_as_they_were_meant(vllm_parser: Any) -> None:
    """Through vLLM's parser and through the connector's own reader, the configuration is the intended one."""
    from kvshare_layout import config
    from kvshare_operator.core.injection.arguments import connector_config
    from kvshare_operator.core.pool.view import view
    from pods import SETTINGS, engine_of, injected, pod_p0, pool_p1

    container = engine_of(injected(pod_p0()))
    theirs = vllm_parser.parse_args(["serve", "org/m", *container["args"]])
    parsed = theirs.kv_transfer_config
    assert parsed.kv_connector == "KVShareConnector"
    assert parsed.kv_load_failure_policy == "recompute"
    read = config.parse(parsed.kv_connector_extra_config)
    assert read.mistakes == ()
    assert read.config == connector_config(view(pool_p1(), ""), "both", SETTINGS)
    assert theirs.block_size == 16
