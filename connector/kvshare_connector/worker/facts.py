"""Facts of a rank: from the engine's tensors, specifications and backends to plain values.

Trusts the tensors' real strides, not the configuration. What it does not know for certain it calls unknown; an unknown
cell encoding is never shared.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvshare_layout.config import LAYOUTS
from kvshare_layout.facts import LayerFacts, RankFacts
from kvshare_layout.kinds import Retention

#: Backends whose cell is K then V of one head and one token, by their own name.
KV_PACKED = frozenset({
    "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "FLASHINFER", "FLEX_ATTENTION", "HPC_ATTN",
})  # fmt: skip

#: Class attribute with which an attention backend outside vLLM says what its cells hold, for example ``kv-packed``.
ENCODING_ATTRIBUTE = "kvshare_cell_encoding"


@dataclass(frozen=True)
class LayerView:
    """A layer's cache as bytes.

    Attributes:
        index: index of the hidden layer.
        cache: uint8 view ``[B, H, N, C]``, or ``[B, H, R, n, C]`` where a block is R kernel blocks of n tokens; the
            last axis is dense, all others have their real strides.
    """

    index: int
    cache: torch.Tensor


def block_view(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View a layer's cache ``[B * R, H, n, C]`` as bytes with the manager's blocks in front.

    Raises:
        ValueError: not a cache of ``num_blocks`` blocks with a dense last axis.
    """
    if tensor.dim() != 4 or num_blocks < 1 or tensor.shape[0] % num_blocks or tensor.stride(-1) != 1:
        raise ValueError(
            f"cache of shape {tuple(tensor.shape)} and strides {tensor.stride()} given, "
            f"[blocks, heads, tokens, content] with {num_blocks} blocks and dense content expected"
        )
    data = tensor.view(torch.uint8)
    ratio = data.shape[0] // num_blocks
    return data if ratio == 1 else data.unflatten(0, (num_blocks, ratio)).transpose(1, 2)


def layout_name(shape: Sequence[int], strides: Sequence[int], layer_stride: int | None) -> str:
    """Name of the physical layout of a logical ``[B, H, N, C]`` cache.

    Args:
        shape: of one layer.
        strides: in any unit, of one layer.
        layer_stride: distance to the next layer in the same unit; None when layers do not share an allocation.

    Returns:
        the first of vLLM's names whose axis order agrees with the strides, or ``other``. Axes of size 1 agree with any.
    """
    stride_of = dict(zip("BHN", strides, strict=False))
    size_of = dict(zip("BHN", shape, strict=False))
    for name in LAYOUTS:
        order = [axis for axis in name if axis in stride_of and size_of[axis] > 1]
        if layer_stride is not None:
            order = [axis for axis in name if axis in order or axis == "L"]
        elif name[0] != "L":
            continue
        steps = [layer_stride if axis == "L" else stride_of[axis] for axis in order]
        if all(a is not None and b is not None and a >= b for a, b in itertools.pairwise(steps)):
            return name
    return "other"


def retention_of(spec: Any) -> Retention:
    """Retention rule of a specification, by its class."""
    names = {cls.__name__ for cls in type(spec).__mro__}
    if "SlidingWindowSpec" in names or "SlidingWindowMLASpec" in names:
        return Retention("window", int(spec.sliding_window))
    if "MambaSpec" in names:
        return Retention("state")
    if "FullAttentionSpec" in names and "SinkFullAttentionSpec" not in names and "HiddenStateCacheSpec" not in names:
        return Retention("full")
    return Retention("other")


def encoding_of(spec: Any, backend: Any, layer: Any) -> tuple[str, bool]:
    """Cell encoding id of a layer, and whether its heads can be moved one by one.

    Args:
        spec: the layer's cache specification.
        backend: its attention backend class.
        layer: the attention layer, which carries the CPU kernel's name.
    """
    name = str(backend.get_name()) if backend is not None else "none"
    declared = getattr(backend, ENCODING_ATTRIBUTE, None)
    quant = getattr(spec, "kv_quant_mode", None)
    dtype = str(getattr(spec, "dtype", "")).removeprefix("torch.")
    detail = f"{dtype}:{getattr(spec, 'head_size', 0)}+{getattr(spec, 'head_size_v', 0)}"
    if quant is not None and int(quant):
        detail += f":{quant.name.lower()}"
    cache_dtype = getattr(spec, "cache_dtype_str", None)
    if cache_dtype not in (None, "auto"):
        detail += f":{cache_dtype}"
    if getattr(spec, "tokens_per_state", 1) != 1:
        return f"compressed:{name}:{detail}", False
    if getattr(spec, "num_head_slots", None) is not None:
        return f"slots{spec.num_head_slots}:{name}:{detail}", False
    if getattr(spec, "state_content_bytes", None) is not None:
        if getattr(quant, "is_per_token_head", False) and name in KV_PACKED:
            return f"kv-packed-scaled:{name}:{detail}:{spec.state_content_bytes}", True
        return f"opaque:{name}:{detail}:{spec.state_content_bytes}", False
    if any(cls.__name__ == "MLAAttentionSpec" for cls in type(spec).__mro__):
        return f"mla-latent:{detail}", True
    if declared is not None:
        return f"{declared}:{detail}", True
    if name in KV_PACKED:
        return f"kv-packed:{detail}", True
    if name == "CPU_ATTN" and (isa := getattr(layer, "isa", None)):
        return f"cpu-{isa}:{detail}", True
    return f"unknown:{name}:{detail}", False


def layer_index(name: str) -> int | None:
    """Index of the hidden layer in the engine's name of an attention layer, or None."""
    match = re.search(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)(?:\.|$)", name) or re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else None


def gather(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    layers: Mapping[str, Any],
    *,
    rank: int,
    tp_rank: int,
    pp_rank: int,
    problem: str = "",
) -> tuple[RankFacts, tuple[LayerView, ...]]:
    """Facts and byte views of all layers of this rank, in ascending order of layers.

    Args:
        kv_caches: the engine's tensors by layer name.
        kv_cache_config: the engine's cache configuration (groups, number of blocks).
        layers: the engine's attention layers by name.
        rank: rank inside the engine.
        tp_rank: tensor-parallel rank.
        pp_rank: pipeline rank.
        problem: a problem that is known already.
    """
    problems = [problem] if problem else []
    specs = {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    found: list[tuple[LayerFacts, LayerView]] = []
    tensors = {
        name: tensor
        for name, tensor in kv_caches.items()
        if getattr(layers.get(name), "kv_sharing_target_layer_name", None) is None
    }
    for name, tensor in tensors.items():
        spec, index = specs.get(name), layer_index(name)
        if spec is None or index is None:
            problems.append(f"LayerUnknown: layer {name} has no cache specification or no index in its name")
            continue
        if not isinstance(tensor, torch.Tensor):
            found.append((_opaque(name, index, spec), LayerView(index, torch.empty(0, dtype=torch.uint8))))
            continue
        try:
            view = block_view(tensor, kv_cache_config.num_blocks)
        except ValueError as error:
            problems.append(f"CacheShapeUnknown: layer {name}: {error}")
            continue
        backend = layers[name].get_attn_backend() if name in layers else None
        encoding, sliceable = encoding_of(spec, backend, layers.get(name))
        tokens = view[0, 0].numel() // view.shape[-1]
        layer = LayerFacts(
            name, index, retention_of(spec), encoding, sliceable, view.shape[1], view.shape[-1], tokens,
            layout_name(tensor.shape, tensor.stride(), _layer_stride(tensor, tensors.values())),
        )  # fmt: skip
        found.append((layer, LayerView(index, view)))
    found.sort(key=lambda pair: pair[0].index)
    indices = [facts.index for facts, _ in found]
    if len(set(indices)) != len(indices):
        problems.append(f"LayerUnknown: several caches belong to one layer, layers {indices}")
    facts = RankFacts(rank, tp_rank, pp_rank, tuple(facts for facts, _ in found), tuple(problems))
    return facts, tuple(view for _, view in found)


def _opaque(name: str, index: int, spec: Any) -> LayerFacts:
    """A cache that is not one tensor, such as a recurrent state."""
    return LayerFacts(
        name, index, retention_of(spec), f"state:{type(spec).__name__}", False, 1, 1, spec.block_size, "other"
    )


def _layer_stride(tensor: torch.Tensor, others: Any) -> int | None:
    """Distance in elements to the nearest other layer in the same storage, or None."""
    storage = tensor.untyped_storage().data_ptr()
    distances = [
        abs(other.data_ptr() - tensor.data_ptr()) // tensor.element_size()
        for other in others
        if isinstance(other, torch.Tensor)
        and other.untyped_storage().data_ptr() == storage
        and other.data_ptr() != tensor.data_ptr()
    ]
    return min(distances) if distances else None
