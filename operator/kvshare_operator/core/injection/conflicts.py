"""Compares a container's own settings with the pool's, before anything is changed.

Why this exists: an injection is all or nothing, so every reason against it must be found first. Each check
is one function over plain values; the order of ``check`` is the order in which a person would mend things.
What cannot be seen is said as a warning; only the tensor-parallel size must be known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvshare_layout import heads
from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.commandline.flags import Arguments, Seen
from kvshare_operator.core.commandline.reading import Reading
from kvshare_operator.core.injection.optin import OptIn
from kvshare_operator.core.pool.view import PoolView


class ConflictError(Exception):
    """Carries the refusal from a check to the one place that catches it."""

    def __init__(self, refused: Refusal) -> None:
        self.refusal = refused
        super().__init__(refused.sentence())


def local_tp(name: str, reading: Reading, opt_in: OptIn) -> int:
    """Return the tensor-parallel size of this pod. Raises ConflictError when it cannot be known."""
    seen = reading.arguments.get("--tensor-parallel-size")
    number = seen.number()
    declared = opt_in.tensor_parallel_size
    if number is not None:
        if declared not in (None, number):
            raise ConflictError(
                refusal(
                    "AnnotationInvalid",
                    annotation=names.TENSOR_PARALLEL_SIZE,
                    given=str(declared),
                    expected=f"{number}, as on the command line, or no annotation",
                )
            )
        return number
    if declared is not None:
        return declared
    if seen.given:
        problem = f"--tensor-parallel-size is {seen.text!r}, not a number"
    elif seen.unknown is not None:
        problem = seen.unknown
    elif reading.arguments.get("--config").present:
        problem = "it may stand in the --config file, whose content cannot be seen here"
    elif not reading.complete:
        problem = "the image's ENTRYPOINT may set it"
    else:
        return 1
    raise ConflictError(refusal("TPUnknown", container=name, problem=problem))


def check(
    container: Mapping[str, Any],
    reading: Reading,
    opt_in: OptIn,
    pool: PoolView,
    ours: tuple[str, ...],
    *,
    taken_in: bool = False,
) -> tuple[int, tuple[str, ...]]:
    """Compare everything; return (local TP, warnings). Raises ConflictError at the first reason against it.

    ``ours`` are the dotted flags that would be injected: a pod that already has exactly them is no conflict.
    ``taken_in`` tells that the pod's own JSON flag is one that ours goes into.
    """
    name = str(container.get("name", ""))
    arguments = reading.arguments
    _nodes(name, arguments)
    _connector(name, arguments, ours, taken_in)
    _model(name, reading, pool)
    tp = local_tp(name, reading, opt_in)
    _sizes(tp, opt_in, pool)
    warnings: list[str] = []
    _pipeline(arguments, pool)
    _context(name, arguments)
    _cache(name, arguments, pool)
    warnings.extend(_seed(name, container, reading))
    warnings.extend(_unseen(arguments, pool))
    if reading.needs_variable:
        warnings.append(
            f"the script stops at variables that are not set (set -u), and {names.ARGS_VARIABLE} is set in injected "
            f"pods only: write ${{{names.ARGS_VARIABLE}:-}}, so that the engine starts without KVShare as well"
        )
    return tp, tuple(warnings)


def python_path(container: Mapping[str, Any], reading: Reading) -> None:
    """Raise ConflictError when the command line itself hides the folder in which the connector's code is delivered."""
    if reading.loses("PYTHONPATH", names.PAYLOAD_PATH):
        raise ConflictError(
            refusal(
                "EnvConflict",
                container=str(container.get("name", "")),
                variable="PYTHONPATH",
                problem=" on its command line or in its script, without the value that it had (in a script: "
                "PYTHONPATH=/app:$PYTHONPATH)",
            )
        )


def _nodes(name: str, arguments: Arguments) -> None:
    seen = arguments.get("--nnodes")
    if seen.present and seen.number() != 1:
        given = seen.text if seen.given else "to something that cannot be read"
        raise ConflictError(refusal("MultiNodeUnsupported", container=name, given=given))


def _connector(name: str, arguments: Arguments, ours: tuple[str, ...], taken_in: bool) -> None:
    json_flag = arguments.get("--kv-transfer-config")
    if json_flag.present and not taken_in:
        connector = _connector_name(json_flag.text)
        problem = f" (connector {connector})" if connector else ""
        raise ConflictError(refusal("FlagConflict", container=name, flag="--kv-transfer-config", problem=problem))
    present = [flag.text for flag in arguments.dotted if flag.option == "--kv-transfer-config"]
    if present and set(present) != set(ours):
        foreign = next((flag for flag in present if flag not in ours), present[0])
        problem = "; flags copied from another pod must be removed together with the record annotation"
        raise ConflictError(
            refusal(
                "FlagConflict",
                container=name,
                flag=foreign,
                problem=problem if "KVShareConnector" in " ".join(present) else "",
            )
        )
    if arguments.get("--kv-offloading-size").present:
        problem = ", which configures another KV connector"
        raise ConflictError(refusal("FlagConflict", container=name, flag="--kv-offloading-size", problem=problem))
    caching = arguments.get("--enable-prefix-caching")
    if caching.text == "--no-enable-prefix-caching":
        problem = ": without prefix caching no block has a key"
        raise ConflictError(refusal("FlagConflict", container=name, flag="--no-enable-prefix-caching", problem=problem))


def _connector_name(text: str | None) -> str:
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return ""
    return str(found.get("kv_connector", "")) if isinstance(found, dict) else ""


def _model(name: str, reading: Reading, pool: PoolView) -> None:
    wanted = pool.spec.model
    seen = reading.arguments.get("--model")
    allowed = {wanted.name, *(path.rstrip("/") or "/" for path in wanted.paths or [])}
    expected = f"{wanted.name}" + (f" ({', '.join(wanted.paths)})" if wanted.paths else "")
    if seen.given and seen.text is not None:
        if seen.text not in allowed and (seen.text.rstrip("/") or "/") not in allowed:
            raise ConflictError(refusal("ModelMismatch", container=name, given=f"model {seen.text}", expected=expected))
    elif (
        not seen.present and seen.unknown is None and reading.complete and not reading.arguments.get("--config").present
    ):
        given = "vLLM's default model (none is named)"
        raise ConflictError(refusal("ModelMismatch", container=name, given=given, expected=expected))
    revision = reading.arguments.get("--revision")
    if wanted.revision is None or revision.unknown is not None:
        return
    if revision.given and revision.text != wanted.revision:
        given = f"revision {revision.text}"
    elif not revision.given and seen.text == wanted.name:
        given = f"{wanted.name} without --revision"
    else:
        return
    raise ConflictError(refusal("ModelMismatch", container=name, given=given, expected=f"revision {wanted.revision}"))


def _sizes(tp: int, opt_in: OptIn, pool: PoolView) -> None:
    listed = pool.spec.sizes_for(opt_in.role)
    problem = None
    if pool.resolution.kv_heads is not None:
        problem = heads.tp_problem(tp, pool.resolution.kv_heads)
    if tp not in listed or problem:
        expected = ", ".join(map(str, listed)) or "none"
        raise ConflictError(refusal("TPNotInPool", given=tp, pool=pool.name, role=opt_in.role, expected=expected))


def _pipeline(arguments: Arguments, pool: PoolView) -> None:
    seen = arguments.get("--pipeline-parallel-size")
    listed = pool.spec.pipeline_parallel_sizes
    size = seen.number() if seen.given else 1
    if seen.unknown is None and not _in_file(arguments, seen) and size not in listed:
        expected = ", ".join(map(str, sorted(listed)))
        raise ConflictError(
            refusal("PPMismatch", given=seen.text if seen.given else 1, pool=pool.name, expected=expected)
        )


def _context(name: str, arguments: Arguments) -> None:
    for flag in ("--decode-context-parallel-size", "--prefill-context-parallel-size"):
        seen = arguments.get(flag)
        if seen.given and seen.number() != 1:
            raise ConflictError(refusal("ContextParallel", container=name, flag=flag, given=seen.text))


def _cache(name: str, arguments: Arguments, pool: PoolView) -> None:
    cache = pool.spec.cache
    block = arguments.get("--block-size")
    if block.given and block.number() != cache.block_size_tokens:
        raise ConflictError(
            refusal("BlockMismatch", container=name, given=block.text, expected=cache.block_size_tokens)
        )
    algorithm = arguments.get("--prefix-caching-hash-algo")
    if algorithm.given and algorithm.text != cache.hash_algorithm:
        problem = f"={algorithm.text}, the pool's cache.hashAlgorithm is {cache.hash_algorithm}"
        raise ConflictError(refusal("FlagConflict", container=name, flag="--prefix-caching-hash-algo", problem=problem))
    dtype = arguments.get("--kv-cache-dtype")
    compared = dtype.unknown is None and not _in_file(arguments, dtype)
    if cache.dtype is not None and compared and (dtype.text or "auto") != cache.dtype:
        raise ConflictError(refusal("DtypeMismatch", container=name, given=dtype.text or "auto", expected=cache.dtype))


def _in_file(arguments: Arguments, seen: Seen) -> bool:
    """Whether an option that is not on the command line may stand in a --config file."""
    return not seen.present and arguments.get("--config").present


def _seed(name: str, container: Mapping[str, Any], reading: Reading) -> list[str]:
    warnings = []
    own = [{"name": variable, "value": text} for variable, text in reading.environment if text is not None]
    for entry in [*(container.get("env") or []), *own]:
        if entry.get("name") == "VLLM_PP_LAYER_PARTITION":
            warnings.append("VLLM_PP_LAYER_PARTITION is set: this member may be isolated")
        if entry.get("name") != "PYTHONHASHSEED":
            continue
        if entry.get("valueFrom") is not None:
            warnings.append("PYTHONHASHSEED comes by reference: every member of the pool needs the same value")
        elif str(entry.get("value")) == "random":
            raise ConflictError(refusal("SeedConflict", container=name))
        elif entry.get("value"):
            warnings.append(f"PYTHONHASHSEED={entry['value']}: every member of the pool needs the same value")
    return warnings


def _unseen(arguments: Arguments, pool: PoolView) -> list[str]:
    """Say what could not be compared; the member's fingerprint catches a difference later."""
    compared = {
        "--model": "model",
        "--revision": "revision" if pool.spec.model.revision is not None else "",
        "--pipeline-parallel-size": "pipeline-parallel size",
        "--decode-context-parallel-size": "decode-context-parallel size",
        "--prefill-context-parallel-size": "prefill-context-parallel size",
        "--block-size": "block size",
        "--kv-cache-dtype": "KV-cache dtype" if pool.spec.cache.dtype is not None else "",
        "--prefix-caching-hash-algo": "prefix hash",
        "--kv-transfer-config": "KV connector",
    }
    if arguments.get("--config").present:
        return ["a --config file is used: what it sets could not be compared with the pool"]
    unseen = [label for flag, label in compared.items() if label and arguments.get(flag).unknown is not None]
    return [f"could not be read and was not compared with the pool: {', '.join(unseen)}"] if unseen else []
