"""A played engine whose layers have two caches: a latent and the keys of an indexer, in one cache group.

Specifications, groups, allocation and views are made by vLLM's own code from its own indexer's cache class; the forward
pass writes the keys as CUDA's kernels do: a page holds the values of all its tokens, then their scales.
"""

import importlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from played_engine import Engine, Rank, Work, World
from played_model import Shape, Text, WrongBytesError
from poison import POISON

#: Where vLLM makes groups and allocations: since 0.33 in a module of its own.
PLANNING: Any = kv_cache_utils
if not hasattr(kv_cache_utils, "get_kv_cache_config_from_groups"):
    PLANNING = importlib.import_module("vllm.v1.core.kv_cache_planning")
#: Bytes of a token's values and of its scale.
VALUES, SCALE = 128, 4
#: What tells an indexer's bytes from those of its layer's latent.
_SALT = 5000


def shape(**changes: Any) -> Shape:
    """A model of four layers with latents of 8 bytes, in blocks of 16 tokens."""
    return Shape(**{"kv_heads": 1, "block_tokens": 16, "latent": True, **changes})


def latent_name(layer: int) -> str:
    """vLLM's name of a layer's latent."""
    return f"model.layers.{layer}.self_attn.attn"


def indexer_name(layer: int) -> str:
    """vLLM's name of a layer's indexer."""
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def indexer_cache(block_tokens: int) -> Any:
    """vLLM's own layer of an indexer's cache, without a model around it."""
    cache = DeepseekV32IndexerCache.__new__(DeepseekV32IndexerCache)
    torch.nn.Module.__init__(cache)
    cache.head_dim, cache.dtype = VALUES + SCALE, torch.uint8
    cache.cache_config = SimpleNamespace(block_size=block_tokens)
    return cache


def keys_of(text: Text, start: int, end: int, layer: int) -> npt.NDArray[np.uint8]:
    """The keys of tokens: uint8 ``[tokens, values and scale]``."""
    (keys,) = text.cells(start, end, layer + _SALT, range(1), VALUES + SCALE)
    return keys  # type: ignore[no-any-return]


class IndexerWorld(World):
    """What engines with indexers share.

    Attributes:
        page: tokens of a kernel's page.
        skipped: layers that use another layer's choice and have no indexer.
    """

    page = 16
    skipped: frozenset[int] = frozenset()

    def __init__(self, config: Any, model: Shape) -> None:
        super().__init__(config, model)
        # vLLM turns both off for latents on a CPU.
        self.config.cache_config.enable_prefix_caching = True
        scheduler = self.config.scheduler_config
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = True, 64

    def block(self, kind: str, text: Text, number: int, layer: int, part: tuple[int, int]) -> bytes:
        """Bytes of one layer in an object of a kind: pages of values and scales in the case of an indexer."""
        if kind != "indexer":
            return super().block(kind, text, number, layer, part)
        start, end = number * self.shape.block_tokens, (number + 1) * self.shape.block_tokens
        pages = [keys_of(text, first, first + self.page, layer) for first in range(start, end, self.page)]
        return b"".join(page[:, part].tobytes() for page in pages for part in (slice(VALUES), slice(VALUES, None)))


class LatentBackend:
    """A backend of latents."""

    @staticmethod
    def get_name() -> str:
        """As vLLM's own."""
        return "FLASHMLA_SPARSE"


class IndexerRank(Rank):
    """One rank with two caches in most layers."""

    engine: "IndexerEngine"

    def allocate(self, config: Any) -> dict[str, torch.Tensor]:
        """One poisoned allocation and vLLM's own views of it."""
        page, layout = self.engine.world.page, KVCacheLayout[self.engine.layout]
        size = max(tensor.size for tensor in config.kv_cache_tensors)
        self.storage = torch.full((size,), POISON, dtype=torch.uint8)
        (group,) = config.kv_cache_groups
        self.named: dict[str, torch.Tensor] = {}
        for tensor in config.kv_cache_tensors:
            spec = group.kv_cache_spec.kv_cache_specs[tensor.layers[0]]
            views = create_kv_cache_views(
                self.storage.view(torch.int8), spec, config.num_blocks, layout, tensor, kernel_block_size=page
            )
            self.named.update(zip(tensor.layers, views, strict=True))
        return self.named

    def attention_layers(self) -> dict[str, Any]:
        """The latents' layers and the indexers' caches."""
        keys, latent = (
            indexer_cache(self.engine.world.shape.block_tokens),
            SimpleNamespace(get_attn_backend=lambda: LatentBackend),
        )
        return {name: keys if ".indexer." in name else latent for name in self.named}

    def _forward(self, item: Work) -> None:
        for name, view in self.named.items():
            layer, indexer = int(name.split(".")[2]), ".indexer." in name
            if indexer:
                expected = keys_of(item.text, 0, item.end, layer)
            else:
                expected = item.text.cells(0, item.end, layer, range(1), self.engine.world.shape.cell)[0]
            pages = self._pages(name, view, item.tables[0], item.end)
            found = _tokens(pages, indexer)[: item.start]
            if not np.array_equal(found, expected[: item.start]):
                raise WrongBytesError(
                    f"rank {self.rank}, {name}, request {item.request_id}: of {item.start} tokens that count as "
                    "computed some have other bytes in the cache"
                )
            for position in range(item.start, item.end):
                data = expected[position] ^ (255 if position >= item.wrong_from else 0)
                page, token = pages[position // len(pages[0])], position % len(pages[0])
                if indexer:
                    flat, scales = page.view(-1).numpy(), len(page) * VALUES
                    flat[token * VALUES : (token + 1) * VALUES] = data[:VALUES]
                    flat[scales + token * SCALE : scales + (token + 1) * SCALE] = data[VALUES:]
                else:
                    page[token] = torch.from_numpy(data)

    def _pages(self, name: str, view: torch.Tensor, table: list[int], end: int) -> list[torch.Tensor]:
        """The kernel's pages ``[n, C]`` of the tokens up to ``end``."""
        page, tokens = self.engine.world.page, self.engine.world.shape.block_tokens
        blocks, ratio = table[: -(-end // tokens)], tokens // page
        if 0 in blocks or len(blocks) * tokens < end:
            raise WrongBytesError(f"{name} has no block for some of {end} tokens")
        data = view.view(torch.uint8)
        return [data[block * ratio + part, 0] for block in blocks for part in range(ratio)]


def _tokens(pages: list[torch.Tensor], indexer: bool) -> npt.NDArray[np.uint8]:
    """The bytes of the tokens in pages: uint8 ``[tokens, C]``."""
    if not indexer:
        return np.concatenate([page.numpy() for page in pages])
    count = len(pages[0])
    flat = np.stack([page.reshape(-1).numpy() for page in pages])
    values = flat[:, : count * VALUES].reshape(-1, VALUES)
    return np.concatenate([values, flat[:, count * VALUES :].reshape(-1, SCALE)], axis=1)


class IndexerEngine(Engine):
    """An engine with indexers."""

    world: IndexerWorld
    rank_class = IndexerRank

    def specs(self) -> dict[str, Any]:
        """Specifications of all layers, in the order of vLLM's model."""
        tokens, cell = self.world.shape.block_tokens, self.world.shape.cell
        out: dict[str, Any] = {}
        for layer in range(self.world.shape.layers + self.world.shape.draft_layers):
            has = layer not in self.world.skipped
            out[latent_name(layer)] = MLAAttentionSpec(
                block_size=tokens, num_kv_heads=1, max_tp_shards=1, head_size=cell, dtype=torch.uint8,
                cache_dtype_str="auto", is_index_group_leader=has,
            )  # fmt: skip
            if has:
                out[indexer_name(layer)] = indexer_cache(tokens).get_kv_cache_spec(self.config)
        return out

    def cache_config(self, layers: Iterable[int], heads: int) -> Any:
        """vLLM's cache configuration of a rank, from its own groups and its own allocation."""
        mine = set(layers)
        self.config.cache_config.kv_cache_layout = self.layout
        self.config.cache_config.num_gpu_blocks_override = self.blocks
        (group,) = PLANNING.get_kv_cache_groups(self.config, self.specs())
        specs = {
            name: spec for name, spec in group.kv_cache_spec.kv_cache_specs.items() if int(name.split(".")[2]) in mine
        }
        whole = UniformTypeKVCacheSpecs(block_size=self.world.shape.block_tokens, kv_cache_specs=specs)
        groups = [KVCacheGroupSpec(list(specs), whole)]
        return PLANNING.get_kv_cache_config_from_groups(self.config, groups, whole.page_size_bytes * self.blocks)
