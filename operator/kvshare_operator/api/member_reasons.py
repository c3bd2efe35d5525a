"""What to do about each reason for which an engine does not share.

Why this exists: an engine says what it found, in words of its own; what its owner does about it stands here once, for
`kvshare check` and for the reference page. The codes are those of the connector, which is not imported here.
"""

from __future__ import annotations

from typing import Final

_REPORT: Final = "Please report it; `kvshare must-gather` collects what is needed."

MEMBER_REMEDIES: Final[dict[str, str]] = {
    "BlockMismatch": "Remove --block-size from the engine: the pool sets it. Where the engine chooses another size all "
    "the same, make a pool with that size (cache.blockSizeTokens).",
    "CacheShapeUnknown": f"Choose another attention backend. {_REPORT}",
    "ConfigInvalid": "Correct the keys that the message names; the operator never writes such a configuration.",
    "ContextParallel": "Run without context parallelism, or do not opt this engine in.",
    "EncodingNotSliceable": "Choose another attention backend or cache dtype: this one mixes heads in a cell.",
    "EngineUnsupported": "Use an image with vLLM 0.30 or later.",
    "FactsInconsistent": f"Restart the engine; its ranks told things that contradict each other. {_REPORT}",
    "HashMismatch": "Remove the engine's own --prefix-caching-hash-algo: the pool sets it.",
    "HashNotReproducible": "Remove PYTHONHASHSEED=random, and let the pool set the hash algorithm.",
    "HashSeedChanged": f"Remove what sets the hash seed after the start, such as a plugin. {_REPORT}",
    "HeadsMismatch": "Choose a TP size that divides the model's KV heads, or is a multiple of them.",
    "InternalError": f"The engine serves without the cache. {_REPORT}",
    "LayerUnknown": f"This model's layers are named in a way that is not known. {_REPORT}",
    "MooncakeMissing": "Use an image that contains it, or install mooncake-transfer-engine.",
    "NoKVCache": "Nothing can be cached for this model; remove the annotation.",
    "PPMismatch": "List the engine's size in pipelineParallelSizes of the pool, and let vLLM split the layers itself "
    "(no VLLM_PP_LAYER_PARTITION), then restart.",
    "PipelineWithDraft": "Use pipeline parallelism or speculative decoding, not both, or vLLM's second model runner "
    "where it takes both (VLLM_USE_V2_MODEL_RUNNER=1).",
    "PrefixCachingOff": "Start the engine with --enable-prefix-caching.",
    "SeveralKinds": "Caches without a common form cannot be shared; where the message names a feature, leave it out.",
    "SleepMode": "Start the engine without --enable-sleep-mode.",
    "StagingTooSmall": "Raise connector.stagingMemoryPerRank of the pool.",
    "StoreTPInvalid": "List the engine's TP size in the pool, or correct storeTPSize.",
    "StreamedInput": "Send sessions with streamed input to an engine of their own, then restart this one.",
    "WeightsUnknown": "Load weights from files that the engine can read, and send none into a running engine.",
}
"""By reason code; a code that is not here is one of another version."""


def member_remedy(code: str) -> str:
    """Return what to do about a member's reason; empty for a code that this version does not know."""
    return MEMBER_REMEDIES.get(code, "")
