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

from kvshare_connector.worker.indexers import indexer_encoding
from kvshare_connector.worker.setting import Setting
from kvshare_connector.worker.states import state_encoding
from kvshare_layout.config import LAYOUTS
from kvshare_layout.facts import LayerFacts, RankFacts
from kvshare_layout.kinds import INDEXER, STATE, Retention

#: Backends whose cell is K then V of one head and one token, by their own name.
KV_PACKED = frozenset({
    "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "FLASHINFER", "FLEX_ATTENTION", "HPC_ATTN",
})  # fmt: skip

#: Specifications that are special cases of full attention, with blocks that live by rules of their own: sinks, hidden
#: states, and windows over the answer only.
_OTHER_RULES = frozenset({"SinkFullAttentionSpec", "HiddenStateCacheSpec", "RSWASpec"})

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
    if names & _OTHER_RULES:
        return Retention("other")
    if "SlidingWindowSpec" in names:
        # A class made of it has blocks that live by rules of their own (latents, one block written round and round),
        # and tokens kept below the window mean that the engine computes some of them again.
        plain = type(spec).__name__ == "SlidingWindowSpec" and not getattr(spec, "extra_retained_tokens", 0)
        return _window(spec) if plain else Retention("other")
    if "MambaSpec" in names:
        return Retention("state")
    return Retention("full") if "FullAttentionSpec" in names else Retention("other")


def _window(spec: Any) -> Retention:
    return Retention("window", int(spec.sliding_window))


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


def layer_index(name: str, hidden_layers: int = 0) -> int | None:
    """Index of the hidden layer in the engine's name of an attention layer, or None.

    Layers of a draft count on behind the ``hidden_layers`` of the model. Most drafts name them so; vLLM's standalone
    draft models (`draft_model.model.layers.0`) and some MTP models (`mtp.layers.0`) begin at 0 again.
    """
    match = re.search(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)(?:\.|$)", name) or re.search(r"\.(\d+)\.", name)
    if match is None:
        return None
    index = int(match[1])
    return index + hidden_layers if index < hidden_layers and re.match(r"(draft_model|mtp)\.", name) else index


def gather(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    layers: Mapping[str, Any],
    *,
    rank: int,
    tp_rank: int,
    pp_rank: int,
    problem: str = "",
    setting: Setting | None = None,
) -> tuple[RankFacts, tuple[LayerView, ...]]:
    """Facts and byte views of all caches of this rank, one for one, in ascending order of layers.

    Args:
        kv_caches: the engine's tensors by layer name.
        kv_cache_config: the engine's cache configuration (groups, number of blocks).
        layers: the engine's attention layers by name.
        rank: rank inside the engine.
        tp_rank: tensor-parallel rank.
        pp_rank: pipeline rank.
        problem: a problem that is known already.
        setting: what indexers and states depend on; nothing is known about them without it.
    """
    problems, setting = [problem] if problem else [], setting or Setting()
    specs = {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    groups = {name: n for n, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
    found: list[tuple[LayerFacts, LayerView]] = []
    tensors = {
        name: tensor
        for name, tensor in kv_caches.items()
        if getattr(layers.get(name), "kv_sharing_target_layer_name", None) is None
    }
    for name, tensor in tensors.items():
        spec, index = specs.get(name), layer_index(name, setting.hidden_layers)
        if spec is None or index is None:
            problems.append(f"LayerUnknown: layer {name} has no cache specification or no index in its name")
            continue
        if not isinstance(tensor, torch.Tensor):
            # Not the pages of the versions we know, so nothing is known about it; that is decided with all facts.
            tensor = torch.empty((kv_cache_config.num_blocks, 1, 1, 0), dtype=torch.uint8)
        try:
            view = block_view(tensor, kv_cache_config.num_blocks)
        except ValueError as error:
            problems.append(f"CacheShapeUnknown: layer {name}: {error}")
            continue
        cache, retention = cache_of(spec), retention_of(spec)
        encoding, sliceable = _encoding(cache, spec, layers.get(name), view, setting)
        tokens = int(spec.block_size) if cache == STATE else view[0, 0].numel() // view.shape[-1]
        layer = LayerFacts(
            name, index, retention, encoding, sliceable, view.shape[1], view.shape[-1], tokens,
            layout_name(tensor.shape, tensor.stride(), _layer_stride(tensor, tensors.values())), groups[name], cache,
        )  # fmt: skip
        found.append((layer, LayerView(index, view)))
    found.sort(key=lambda pair: (pair[0].index, pair[0].cache))
    if len({(facts.index, facts.cache) for facts, _ in found}) != len(found):
        indices = [facts.index for facts, _ in found]
        problems.append(f"LayerUnknown: several caches belong to one layer, layers {indices}")
    facts = RankFacts(rank, tp_rank, pp_rank, tuple(facts for facts, _ in found), tuple(problems))
    return facts, tuple(view for _, view in found)


def cache_of(spec: Any) -> str:
    """Which cache of its layer a specification describes: ``indexer``, ``state``, or empty for its attention's own."""
    if retention_of(spec).rule == "state":
        return STATE
    role = getattr(spec, "cache_role", None)
    return INDEXER if getattr(role, "value", role) == "indexer" else ""


def _encoding(cache: str, spec: Any, layer: Any, view: torch.Tensor, setting: Setting) -> tuple[str, bool]:
    backend = layer.get_attn_backend() if layer is not None else None
    if cache == STATE:
        return state_encoding(spec, backend, layer, view, setting), False
    if cache:
        return indexer_encoding(spec, backend, layer, view, setting)
    return encoding_of(spec, backend, layer)


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
