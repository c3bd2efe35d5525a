"""Compat: the only place that knows differences between versions of vLLM.

Supported are 0.30 to 0.33. Everything here is a thin accessor; no rule of the connector lives here.
"""

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import vllm
import vllm.distributed.kv_events as kv_events_module
from vllm import platforms
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


def forgets_taken_back_blocks() -> bool:
    """Whether the hash of a block goes with a token that a session with streamed input takes back; since 0.32."""
    return not (0, 0) < version() < (0, 32)


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


def block_tables(scheduler_output: Any, request_id: str) -> tuple[list[int], ...] | None:
    """The true block tables of a request in this step, one for each cache group, or None when it is not scheduled."""
    state = scheduler_output.kv_connector_block_state
    return None if state is None else state.get_block_ids(request_id)


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of one block hash; with several cache groups they may be fewer than those of a block."""
    cache = vllm_config.cache_config
    unit = getattr(cache, "prefix_match_unit", None) if len(kv_cache_config.kv_cache_groups) > 1 else None
    return int(getattr(kv_cache_config, "hash_block_size", None) or unit or cache.block_size)


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


def platform_name() -> str:
    """The platform whose kernels fill the caches, ``cuda`` for NVIDIA's."""
    platform = platforms.current_platform
    return "cuda" if platform.is_cuda() else str(platform.device_name)


def eight_bit_form() -> str:
    """Which of the forms of an 8-bit float with four bits of exponent this platform's kernels write."""
    return str(platforms.current_platform.fp8_dtype()).removeprefix("torch.")


def indexer_keys(vllm_config: Any) -> str:
    """Type of the keys of sparse attention's indexers; empty where this vLLM does not say it."""
    attention = getattr(vllm_config, "attention_config", None)
    keys = str(getattr(attention, "indexer_kv_dtype", ""))
    return "fp8" if keys == "auto" else keys


def state_kernels(vllm_config: Any) -> str:
    """Digest of everything that chooses the kernels of recurrent states.

    Some of them lay out states of equal shapes in different ways. Which ones do is not for us to know: engines with
    equal digests run the same.
    """
    platform = platforms.current_platform
    settings = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("VLLM_") and any(part in name for part in ("SSM", "MAMBA", "GDN", "CONV", "FLA"))
    )
    facts = (
        vllm.__version__, platform_name(), platform.get_device_name(), platform.get_device_capability(),
        platform.get_cpu_architecture(), getattr(vllm_config, "mamba_config", None),
        getattr(vllm_config, "additional_config", None), settings,
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def boundary_states(scheduler_output: Any, request_id: str) -> list[tuple[int, int, int]]:
    """The recurrent states of a request that this step leaves behind: cache group, block, and tokens up to there."""
    state = scheduler_output.kv_connector_block_state
    return list((getattr(state, "boundary_state_offloads", None) or {}).get(request_id, ()))


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


def transfer_results(finished_recving: set[str], failed_recving: set[str]) -> KVConnectorTransferResults:
    """Completed loads in the engine's own container, and those of them that the engine must compute from the start."""
    return KVConnectorTransferResults(finished_recving=finished_recving, failed_recving=failed_recving)
