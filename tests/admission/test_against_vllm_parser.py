"""The command-line reader against the installed vLLM's own parser, on generated command lines.

Where vLLM accepts a line, both must agree on every watched option, or the reader must say "unknown".
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import warnings
from typing import Any

import pytest

from kvshare_operator.core.commandline import flags, vllm_flags

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
        "--tensor-parallel-size": ["1", "2", "4", "+4", " 8"],
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
        ["--generation-config", "a.b"], ["-cc.mode=3"],
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


@pytest.mark.filterwarnings("ignore")
def test_both_readers_agree_or_ours_says_unknown(vllm_parser: Any) -> None:
    """Hundreds of lines, most of which vLLM accepts."""
    accepted = 0
    for seed in range(LINES):
        words = line(seed)
        theirs = parsed_by_vllm(vllm_parser, words)
        if theirs is None:
            continue
        accepted += 1
        ours = flags.read(words[1:], serve=True)
        for option, (destination, default) in DESTINATIONS.items():
            seen = ours.get(option)
            if seen.unknown is not None:
                continue
            value: Any = seen.text if seen.given else default
            if isinstance(getattr(theirs, destination), int):
                value = seen.number() if seen.given else default
            assert value == getattr(theirs, destination), f"{option} in {words}"
        model = theirs.model_tag or theirs.model
        assert ours.get("--model").unknown is not None or (ours.get("--model").text or "Qwen/Qwen3-0.6B") == model, (
            words
        )
        asked = ours.get("--enable-prefix-caching")
        if asked.unknown is None:
            wanted = {None: None, "--no-enable-prefix-caching": False}.get(asked.text, True)
            assert theirs.enable_prefix_caching == wanted, words
    assert accepted > LINES // 2


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
