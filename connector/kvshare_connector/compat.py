"""Compat: the only place that knows differences between versions of vLLM.

Supported are 0.30 to 0.33. Everything here is a thin accessor; no rule of the connector lives here.
"""

import os
from collections.abc import Iterable
from typing import Any

import vllm
import vllm.distributed.kv_events as kv_events_module
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.core import kv_cache_utils

from kvshare_connector.scheduler.announcements import Removed, Stored
from kvshare_layout.reports import MAX_ENGINE_INDEX

#: What the store is called in KV events.
MEDIUM = "STORAGE"
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


def engine_index(parallel_config: Any) -> int:
    """Number of this engine among the data-parallel engines of its pod; each has a process of its own."""
    return min(int(getattr(parallel_config, "data_parallel_rank_local", None) or 0), MAX_ENGINE_INDEX)


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


def events_enabled(vllm_config: Any) -> bool:
    """Whether the engine publishes KV events."""
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(events is not None and events.enable_kv_cache_events)


def extra_keys(request: Any, start: int, end: int) -> tuple[Any, ...] | None:
    """What besides its tokens goes into the hash of the block from token ``start`` to ``end``."""
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    return tuple(keys) if keys else None


def kv_events(items: Iterable[Stored | Removed], block_tokens: int) -> list[Any]:
    """The engine's own events, for the medium that the store is to a router: remote storage."""
    external = kv_cache_utils.maybe_convert_block_hash
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)
    out: list[Any] = []
    for item in items:
        if isinstance(item, Removed):
            out.append(_event(kv_events_module.BlockRemoved, block_hashes=[external(h) for h in item.block_hashes]))
            continue
        parent = item.blocks[0].parent
        out.append(
            _event(
                kv_events_module.BlockStored,
                block_hashes=[external(block.block_hash) for block in item.blocks],
                parent_block_hash=None if parent is None else external(parent),
                token_ids=[token for block in item.blocks for token in block.token_ids],
                block_size=block_tokens,
                lora_id=None,
                lora_name=None,
                extra_keys=untagged([block.extra_keys for block in item.blocks]),
            )
        )
    return out


def _event(kind: Any, **fields: Any) -> Any:
    """An event with those of our fields that this version has."""
    ours = {"medium": MEDIUM, "group_idx": 0, "locality": "REMOTE", "ownership": "kvshare"}
    known = {name: value for name, value in {**fields, **ours}.items() if name in kind.__struct_fields__}
    return kind(**known)


def transfer_results(finished_recving: set[str]) -> KVConnectorTransferResults:
    """Completed loads in the engine's own container."""
    return KVConnectorTransferResults(finished_recving=finished_recving)
