"""A model's `config.json`: its KV heads, its layers and its kinds of caches, as far as the file says them.

Why this exists: `kvshare plan` shows what members will store before there is one. Pure; nothing is guessed: what the
file leaves open is left open here, and the members' reports say it in the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvshare_layout.errors import LayoutError
from kvshare_layout.kinds import FULL, INDEXER, Retention

_FULL_LAYERS = frozenset({"full_attention", "attention"})
_WINDOW_LAYERS = frozenset({"sliding_attention", "sliding_window"})
_STATE_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv"})
#: Fields of models with other caches than attention over tokens, or with windows whose layers only their code knows.
_UNSAID = (
    "sliding_window_pattern", "attention_chunk_size", "ssm_cfg", "mamba_d_state", "linear_num_value_heads",
    "full_attention_interval", "attn_layer_period", "hybrid_override_pattern", "block_types", "layers_block_type",
)  # fmt: skip
#: Models whose layers each have an indexer, unless one of the fields behind says that some do without.
_INDEXED = frozenset({"deepseek_v32"})
_SOME_INDEXED = ("index_topk_freq", "index_topk_pattern")
#: Bytes of a key, fp8, whose form is known.
_INDEX_HEAD_BYTES = 128


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """Layers with one kind of cache.

    ``cached`` is False for kinds with which a member is disabled. ``cache`` is empty, or what a second cache is.
    """

    retention: Retention
    layers: tuple[int, ...]
    cached: bool
    cache: str = ""

    @property
    def state(self) -> bool:
        """Whether it is a recurrent state, of which every rank has one that fits no other TP size."""
        return self.retention.rule == "state"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What a file says. ``kv_heads`` and ``layers`` are None, ``kinds`` is empty where it does not say it."""

    kv_heads: int | None
    layers: int | None
    kinds: tuple[ModelKind, ...]


def read_model_config(raw: object) -> ModelConfig:
    """Read a model's configuration; that of the text part where there are several.

    Raises:
        LayoutError: with every field that is not what such a file has.
    """
    if not isinstance(raw, Mapping):
        raise LayoutError("a JSON object, the model's config.json, is expected")
    text = raw.get("text_config")
    config: Mapping[str, Any] = text if isinstance(text, Mapping) else raw
    mistakes: list[str] = []
    numbers = {
        name: _number(config, name, mistakes)
        for name in (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "kv_lora_rank",
            "sliding_window",
        )
    }
    layers = numbers["num_hidden_layers"]
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or not all(isinstance(one, str) for one in types)):
        mistakes.append("layer_types: a list of words expected")
        types = None
    if types is not None and layers is not None and len(types) != layers:
        mistakes.append(f"layer_types: {len(types)} given, one for each of {layers} layers expected")
    if mistakes:
        raise LayoutError(mistakes)
    heads = 1 if numbers["kv_lora_rank"] else numbers["num_key_value_heads"] or numbers["num_attention_heads"]
    return ModelConfig(heads, layers, _kinds(config, layers, types, numbers["sliding_window"]))


def _number(config: Mapping[str, Any], name: str, mistakes: list[str]) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 20:
        mistakes.append(f"{name}: {value!r} given, a whole number from 0 to {1 << 20} expected")
        return None
    return value or None


def _kinds(
    config: Mapping[str, Any], layers: int | None, types: list[str] | None, window: int | None
) -> tuple[ModelKind, ...]:
    if layers is None:
        return ()
    if config.get("index_topk"):
        return _with_indexers(config, layers)
    if types is None:
        said = window is None or config.get("use_sliding_window") is False
        return (ModelKind(FULL, tuple(range(layers)), True),) if said and not any(map(config.get, _UNSAID)) else ()
    found: dict[Retention, list[int]] = {}
    for number, word in enumerate(types):
        found.setdefault(_retention(word, window), []).append(number)
    order = sorted(found, key=lambda one: (one.rule != "full", one.rule, one.window))
    attention = any(one.rule in ("full", "window") for one in order)
    return tuple(ModelKind(one, tuple(found[one]), _cached(one, attention)) for one in order)


def _cached(retention: Retention, attention: bool) -> bool:
    """Whether members store such a cache; a recurrent state only beside attention."""
    return retention.rule in ("full", "window") or (retention.rule == "state" and attention)


def _with_indexers(config: Mapping[str, Any], layers: int) -> tuple[ModelKind, ...]:
    """Latents and the keys of their indexers, where the file is of a model in which every layer has both."""
    if str(config.get("model_type")) not in _INDEXED or config.get("index_head_dim") != _INDEX_HEAD_BYTES:
        return ()
    if not config.get("kv_lora_rank") or any(map(config.get, _SOME_INDEXED)):
        return ()
    every = tuple(range(layers))
    return (ModelKind(FULL, every, True), ModelKind(FULL, every, True, INDEXER))


def _retention(word: str, window: int | None) -> Retention:
    if word in _FULL_LAYERS or (word in _WINDOW_LAYERS and window is None):
        return FULL
    if word in _WINDOW_LAYERS and window is not None:
        return Retention("window", window)
    return Retention("state" if word in _STATE_LAYERS else "other")
