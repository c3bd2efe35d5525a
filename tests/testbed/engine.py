"""A real vLLM server as a process on this machine, on vLLM's CPU platform."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed import pipeline_on_cpu, places
from testbed.completions import Server
from testbed.ports import free_ports
from testbed.process import Process
from testbed.tiny_model import tiny_model

KV_CACHE_BYTES = 128 << 20
START_SECONDS = 240


@dataclass
class Engine:
    """A running engine: its server and its process."""

    server: Server
    process: Process


def cpu_environment(ranks: int) -> dict[str, str]:
    """Variables with which the ranks of one engine share the machine's cores.

    Each rank gets one core when there are enough; otherwise none is bound to a core. torch compiles nothing:
    with several ranks it would need a C++ compiler, which an engine's image does not have.
    """
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1:
        binding = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    elif ranks <= len(cores):
        binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores[:ranks]))}
    else:
        binding = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return {"TORCH_COMPILE_DISABLE": "1", **binding}


def server_arguments(
    *, tp: int = 1, block_tokens: int = 32, max_tokens: int = 2048, dtype: str = "float32"
) -> list[str]:
    """Arguments of `vllm serve` that suit a tiny model; the same for processes and pods.

    Args:
        tp: tensor-parallel size.
        block_tokens: tokens of a cache block; vLLM's CPU attention wants multiples of 32.
        max_tokens: longest context.
        dtype: type of weights, activations and cache.
    """
    return [
        f"--tensor-parallel-size={tp}",
        f"--block-size={block_tokens}",
        f"--max-model-len={max_tokens}",
        f"--max-num-batched-tokens={max_tokens}",
        "--max-num-seqs=8",
        f"--dtype={dtype}",
        f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
        "--enforce-eager",
        "--enable-prompt-tokens-details",
    ]


@contextmanager
def engine(
    folder: Path,
    name: str,
    *,
    tp: int = 1,
    pp: int = 1,
    layout: str | None = None,
    reference_attention: bool = False,
    model: Path | None = None,
    block_tokens: int = 32,
    dtype: str = "float32",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    installation: Path = places.ENVIRONMENT,
) -> Iterator[Engine]:
    """A running vLLM server; it ends with the block.

    Args:
        folder: for its log.
        name: of the log, and for messages.
        tp: tensor-parallel size.
        pp: pipeline size.
        layout: physical cache layout, such as `NHD` or `BLNHC`; the backend's own when None.
        reference_attention: use the any-layout backend instead of vLLM's CPU kernel.
        model: the model's folder; the default tiny model when None.
        block_tokens: tokens of a cache block.
        dtype: type of weights, activations and cache.
        arguments: more arguments of `vllm serve`.
        environment: more variables.
        installation: the Python environment whose vLLM runs.

    Raises:
        NotReadyError: if the server ends or is not healthy in time, with its last lines.
    """
    (port,) = free_ports(1)
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        **cpu_environment(tp * pp),
    }
    if pp > 1:
        variables[pipeline_on_cpu.SWITCH] = "1"
    if reference_attention:
        variables["REFERENCE_ATTENTION"] = "1"
    if layout is not None:
        variables["VLLM_KV_CACHE_LAYOUT"] = layout
    variables.update(environment or {})
    process = Process(
        f"vllm serve ({name})",
        [
            *(installation / "bin" / "vllm", "serve", model or tiny_model()),
            *("--host=127.0.0.1", f"--port={port}"),
            *server_arguments(tp=tp, block_tokens=block_tokens, dtype=dtype),
            f"--pipeline-parallel-size={pp}",
            *arguments,
        ],
        log=folder / f"engine-{name}.log",
        environment=variables,
    )
    server = Server(f"http://127.0.0.1:{port}")
    try:
        process.wait_until(server.healthy, seconds=START_SECONDS, what="become healthy")
        yield Engine(server, process)
    finally:
        process.stop()
