"""Indexers: the second cache of a layer with sparse attention, and whether its bytes are known.

Decided from the specification's fields and the names of classes, never from shapes alone. Known is one form: the keys
of DeepSeek V3.2's indexer on CUDA. A page of n tokens holds the values of all its tokens (128 bytes of fp8 each) and
then their scales (4 bytes each). So the "cell" of 132 bytes is a size and no place: a page is moved whole, and engines
whose kernels have other pages never meet. Every rank computes all of it.
"""

from typing import Any

import torch

from kvshare_connector.worker.setting import Setting
from kvshare_layout.facts import UNKNOWN

#: What the fields of a specification must say. ``max_tp_shards`` 1: the engine itself calls all ranks replicas.
_FIELDS = {
    "num_kv_heads": 1, "head_size": 132, "head_size_v": 0, "max_tp_shards": 1, "tokens_per_state": 1,
    "num_head_slots": None, "state_content_bytes": None, "cache_dtype_str": None, "model_version": None,
}  # fmt: skip


def indexer_encoding(spec: Any, backend: Any, layer: Any, view: torch.Tensor, setting: Setting) -> tuple[str, bool]:
    """Cell encoding id of an indexer's keys, and whether its heads can be moved one by one.

    Args:
        spec: its specification.
        backend: its attention backend class.
        layer: the cache's own layer.
        view: uint8 ``[B, H, n, C]``, or ``[B, H, R, n, C]`` where a block is R pages of n tokens.
        setting: see there.
    """
    tokens, cell = view.shape[-2:]
    facts = [
        ("platform", setting.platform, "cuda"),
        ("type of keys", setting.keys, "fp8"),
        ("specification", type(spec).__name__, "MLAAttentionSpec"),
        ("backend class", getattr(backend, "__name__", None), "DeepseekV32IndexerBackend"),
        ("backend", backend.get_name() if backend is not None else None, "DEEPSEEK_V32_INDEXER"),
        ("cache class", type(layer).__name__, "DeepseekV32IndexerCache"),
        ("uses_shuffled_layout", getattr(layer, "uses_shuffled_layout", None), False),
        ("dtype", str(getattr(spec, "dtype", None)).removeprefix("torch."), "uint8"),
        *((name, getattr(spec, name, "no such field"), wanted) for name, wanted in _FIELDS.items()),
        ("kv_quant_mode", int(getattr(spec, "kv_quant_mode", 0)), 0),
        ("bytes from token to token", view.stride(-2) if tokens > 1 else cell, cell),
        ("bytes of a token", cell, _FIELDS["head_size"]),
    ]
    wrong = [f"{name} {given} given, {wanted} expected" for name, given, wanted in facts if given != wanted]
    if wrong:
        return f"{UNKNOWN}{'; '.join(wrong)}", False
    return f"indexer-pages:fp8:{cell}:{tokens}", True
