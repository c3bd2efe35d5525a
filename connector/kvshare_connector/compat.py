"""Compat: the only place that knows differences between versions of vLLM.

Supported are 0.30 to 0.33. Everything here is a thin accessor; no rule of the connector lives here.
"""

import os
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.core import kv_cache_utils

#: Oldest version whose connector interface is sufficient (request-level failure reports, block state accessor).
OLDEST = (0, 30)


def version_text() -> str:
    """The running vLLM's version."""
    return str(vllm.__version__)


def version() -> tuple[int, int]:
    """Major and minor of the running vLLM; (0, 0) for a version that has no number."""
    parts = vllm.__version__.split("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return 0, 0


def version_problem() -> str:
    """Why this vLLM cannot be served, or an empty string."""
    if (0, 0) < version() < OLDEST:
        return f"EngineUnsupported: vLLM {vllm.__version__} given, 0.30 or later expected"
    return ""


def hash_scheme() -> str:
    """Generation of the rule that turns extra keys into hashes; since 0.31 they are tagged tuples."""
    return "untagged" if (0, 0) < version() < (0, 31) else "tagged"


def none_hash_seed(hash_function: Any) -> str | None:
    """The seed from which this process derives the hash of an empty prefix; None when it is random."""
    non_crypto = getattr(kv_cache_utils, "_NON_CRYPTO_HASH_FUNCTIONS", ())
    if hash_function in non_crypto and os.getenv("PYTHONHASHSEED") is None:
        return None
    return str(kv_cache_utils.resolve_none_hash_seed(hash_function))


def current_none_hash() -> bytes | None:
    """The hash of an empty prefix that the engine really uses, once it has one."""
    value = getattr(kv_cache_utils, "NONE_HASH", None)
    return None if value is None else bytes(value)


def block_table(scheduler_output: Any, request_id: str) -> list[int] | None:
    """The true block table of a request in this step (first group), or None when it is not scheduled."""
    state = scheduler_output.kv_connector_block_state
    if state is None:
        return None
    tables = state.get_block_ids(request_id)
    return None if tables is None else list(tables[0])


def cached_hashes(block_pool: Any) -> list[bytes]:
    """Hashes of all blocks that the engine's own prefix cache can serve."""
    return [
        bytes(kv_cache_utils.get_block_hash(block.block_hash))
        for block in block_pool.blocks
        if block.block_hash is not None
    ]


def transfer_results(finished_recving: set[str]) -> KVConnectorTransferResults:
    """Completed loads in the engine's own container."""
    return KVConnectorTransferResults(finished_recving=finished_recving)
