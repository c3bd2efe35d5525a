"""A played engine with recurrent states: vLLM's own cache managers keep, move and hand over the blocks of states.

A layer has attention or a state. The state of a rank after n tokens is bytes that follow from these tokens, the layer,
the rank and the TP size. As vLLM's workers do, a step reads the state in the block of the last token that counts as
computed, and writes the one after its own last token into that token's block.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec

from played_engine import Engine, Rank, Work, World
from played_model import Shape, Text, WrongBytesError

#: What tells the bytes of a state from those of attention, of another TP size and of another rank.
_SALT, _PER_SIZE = 7000, 64
#: Bytes of all ranks' states of a layer, in two states of each rank.
CONVOLUTION, DELTA = 32, 64


def state_bytes(text: Text, tokens: int, layer: int, tp: int, rank: int) -> bytes:
    """The state of a layer on a rank after ``tokens`` tokens."""
    salted = layer + _SALT * (1 + tp * _PER_SIZE + rank)
    return text.cells(tokens - 1, tokens, salted, range(1), (CONVOLUTION + DELTA) // tp).tobytes()


class StateWorld(World):
    """What engines with states share: every second and third layer of three has a state."""

    def has_state(self, layer: int) -> bool:
        """Whether a layer has a state instead of attention."""
        return layer % 3 != 0

    def block(self, kind: str, text: Text, number: int, layer: int, part: tuple[int, int]) -> bytes:
        """Bytes of one layer in an object of a kind: the state behind the block in the case of states."""
        if not kind.startswith("state-"):
            return super().block(kind, text, number, layer, part)
        return state_bytes(text, (number + 1) * self.shape.block_tokens, layer, part[1], part[0])


class StateRank(Rank):
    """One rank of which some layers have states."""

    engine: "StateEngine"

    def allocate(self, config: Any) -> dict[str, torch.Tensor]:
        """The pages of states are dense, in the memory that attention uses too, as in vLLM."""
        named = super().allocate(config)
        self.states: dict[int, torch.Tensor] = {}
        for layer in [layer for layer in self.caches if self.engine.world.has_state(layer)]:
            place, size = self.caches.pop(layer), (CONVOLUTION + DELTA) // self.engine.tp
            strides = (place.stride(0), size, size, 1)
            shape = (self.engine.blocks, 1, 1, size)
            self.states[layer] = self.storage.as_strided(shape, strides, place.storage_offset())
            name = next(name for name in named if int(name.split(".")[2]) == layer)
            named[name] = self.states[layer].view(torch.int8)
        return named

    def _forward(self, item: Work) -> None:
        super()._forward(item)
        tokens, tp = self.engine.world.shape.block_tokens, self.engine.tp
        for layer, pages in self.states.items():
            table = item.tables[self.group_of[layer]]

            def page(position: int, pages: torch.Tensor = pages, table: list[int] = table) -> torch.Tensor:
                if not table[position // tokens]:
                    raise WrongBytesError(f"request {item.request_id}: no block for the state after {position + 1}")
                return pages[table[position // tokens], 0, 0]

            if item.start:
                expected = state_bytes(item.text, item.start, layer, tp, self.rank % tp)
                if page(item.start - 1).numpy().tobytes() != expected:
                    raise WrongBytesError(
                        f"rank {self.rank}, layer {layer}, request {item.request_id}: the state after {item.start} "
                        "tokens that count as computed has other bytes"
                    )
            after = bytearray(state_bytes(item.text, item.end, layer, tp, self.rank % tp))
            page(item.end - 1).copy_(torch.frombuffer(after, dtype=torch.uint8))


class StateEngine(Engine):
    """An engine with states."""

    world: StateWorld
    rank_class = StateRank

    def __init__(
        self,
        world: StateWorld,
        name: str = "a",
        *,
        tp: int = 1,
        mode: str = "align",
        dtype: torch.dtype = torch.uint8,
        **more: Any,
    ) -> None:
        self.tp, self.mode, self.dtype = tp, mode, dtype
        change = more.pop("change", lambda _: None)

        def with_states(config: Any) -> None:
            config.cache_config.mamba_cache_mode = mode
            change(config)

        super().__init__(world, name, tp=tp, change=with_states, **more)

    def cache_config(self, layers: Iterable[int], heads: int) -> Any:
        """vLLM's cache configuration of a rank: one group of attention and as many of states as it takes."""
        shape: Shape = self.world.shape
        attention = FullAttentionSpec(
            block_size=shape.block_tokens, num_kv_heads=heads, head_size=shape.cell // 2, dtype=torch.uint8
        )
        state = MambaSpec(
            block_size=shape.block_tokens, shapes=((CONVOLUTION // self.tp,), (DELTA // self.tp // 4, 4)),
            dtypes=(torch.uint8, self.dtype), page_size_padded=attention.page_size_bytes, mamba_cache_mode=self.mode,
        )  # fmt: skip
        everywhere = range(shape.layers)
        full = [layer for layer in everywhere if not self.world.has_state(layer)]
        others = [layer for layer in everywhere if self.world.has_state(layer)]
        dealt = [(full, attention), *((others[first::2], state) for first in range(2))][:: self.group_order]
        mine = set(layers)
        groups = [KVCacheGroupSpec([_name(n) for n in numbers if n in mine], spec) for numbers, spec in dealt]
        size = attention.page_size_bytes
        tensors = [
            KVCacheTensor(size=size * self.blocks, layers=[_name(n)], layer_stride=size, block_stride=size)
            for n in sorted(mine)
        ]
        return KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"
