"""Indexers: when the second cache of layers with sparse attention may be stored beside the first.

Pure. One cache group of the engine then holds two caches of a layer: the latent of its attention and the keys of its
indexer. Both are replicas on all tensor-parallel ranks and lie in the same blocks, so a block has both or neither.
Whether the bytes are known is said by the ranks in the encoding; everything that is not proven is refused here.
"""

from collections.abc import Sequence

from kvshare_layout.facts import UNKNOWN, EngineFacts, LayerFacts

#: What begins the encoding of latents, and what stands in that of latents which are packed with their scales.
_LATENT, _PACKED_LATENT = "mla-latent:", "_ds_mla:"


def indexer_problem(engine: EngineFacts, attention: Sequence[LayerFacts], indexers: Sequence[LayerFacts]) -> str:
    """Why these indexers keep the engine from caching, or an empty string.

    Args:
        engine: facts of the scheduler process.
        attention: the attention caches of all ranks.
        indexers: the indexers' caches of all ranks, at least one.
    """
    for layer in indexers:
        if layer.encoding.startswith(UNKNOWN):
            return f"the indexer of layer {layer.index}: {layer.encoding.removeprefix(UNKNOWN)}"
    if engine.cache_groups != 1:
        return f"indexers are cached in one cache group with their attention, {engine.cache_groups} groups given"
    if engine.kv_heads != 1 or any(layer.heads != 1 for layer in (*attention, *indexers)):
        heads = sorted({layer.heads for layer in (*attention, *indexers)})
        return f"indexers are cached beside one latent head, {engine.kv_heads} KV heads and {heads} on a rank given"
    rules = {layer.retention.rule for layer in (*attention, *indexers)}
    if rules != {"full"}:
        return f"indexers are cached beside full attention, retention {', '.join(sorted(rules))} given"
    beside = {layer.index: layer for layer in attention}
    for layer in indexers:
        main = beside.get(layer.index)
        if main is None:
            return f"the indexer of layer {layer.index} has no attention with a cache beside it"
        if not (main.encoding.startswith(_LATENT) or _PACKED_LATENT in main.encoding):
            return f"indexers are cached beside latents, layer {layer.index} with {main.encoding} given"
        if (layer.block_tokens, layer.group) != (main.block_tokens, main.group):
            return (
                f"the indexer of layer {layer.index} has blocks of {layer.block_tokens} tokens in group {layer.group}, "
                f"its attention {main.block_tokens} in group {main.group}: the same blocks expected"
            )
    found = sorted({(layer.encoding, layer.cell_bytes) for layer in indexers})
    return "" if len(found) == 1 else f"indexers of {len(found)} forms given ({found}), one expected"
