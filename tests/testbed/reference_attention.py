"""Attention for vLLM on CPU that reads and writes a cache of any physical layout; slow, obviously right.

vLLM's own CPU kernel takes head-major caches only and packs keys in an order of its own. With this backend the
whole layout matrix runs end to end without a GPU: each cache is the logical tensor `[B, H, N, C]` with whatever
strides vLLM chose, and a cell holds `K | V` of one token and one head, as the common GPU backends have it.

Switched on by the variable `REFERENCE_ATTENTION=1`; `VLLM_KV_CACHE_LAYOUT` chooses the layout. With
`REFERENCE_ATTENTION=undeclared` the backend does not say what its cells hold, as backends outside vLLM do that nobody
has looked at. vLLM finds `register` through the entry point `vllm.general_plugins`, in every process.
"""

import os
from typing import Any, ClassVar

import torch

SWITCH = "REFERENCE_ATTENTION"
ON, UNDECLARED = "1", "undeclared"
NAME = "REFERENCE_ATTN"


def register() -> None:
    """Put this backend in the place of vLLM's CPU attention, when the switch is on."""
    if os.environ.get(SWITCH) not in (ON, UNDECLARED):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # The name is registered too, because vLLM looks a backend up by what `get_name` returns.
    name = backend_name()
    register_backend(getattr(AttentionBackendEnum, name, name), f"{__name__}.ReferenceAttentionBackend")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.ReferenceAttentionBackend")


def backend_name() -> str:
    """Our own name; vLLM before 0.32 takes no new names and has one for everybody."""
    import vllm
    from packaging.version import Version

    return NAME if Version(vllm.__version__) >= Version("0.32") else "CUSTOM"


def write_cells(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store the keys and values of some tokens.

    Args:
        cache: `[B, H, N, C]`, any strides; written in place.
        key: `[T, H, head_size]`.
        value: `[T, H, head_size_v]`, with `C = head_size + head_size_v`.
        slot_mapping: `[T]`, slot `block * N + position` of each token; negative means none.
    """
    block_tokens = cache.shape[2]
    count = min(slot_mapping.shape[0], key.shape[0])
    slots = slot_mapping[:count]
    real = slots >= 0
    slots = slots[real].long()
    cells = torch.cat([key[:count][real], value[:count][real]], dim=-1).to(cache.dtype)
    cache[slots // block_tokens, :, slots % block_tokens, :] = cells


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    *,
    context: int,
    head_size: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Attention of one request's newest tokens to its cached ones.

    Args:
        query: `[T, query heads, head_size]`, the last T tokens of the context.
        cache: `[B, H, N, C]`, any strides.
        blocks: the request's block numbers, at least enough for the context.
        context: number of tokens to look at, the T newest included.
        head_size: width of a key; the rest of a cell is the value.
        scale: factor of the scores.
        causal: whether a token sees only itself and older ones.
        window: how many older tokens a token sees at most; negative for all.
        softcap: limit of the scores by tanh; 0 for none.

    Returns:
        `[T, query heads, head_size_v]`, float32.
    """
    heads, block_tokens = cache.shape[1], cache.shape[2]
    tokens = query.shape[0]
    needed = -(-context // block_tokens)
    cells = cache[blocks[:needed].long()].permute(1, 0, 2, 3).reshape(heads, needed * block_tokens, -1)
    cells = cells[:, :context].float().repeat_interleave(query.shape[1] // heads, dim=0)
    scores = query.float().permute(1, 0, 2) @ cells[..., :head_size].transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(context - tokens, context)[:, None]
    other = torch.arange(context)[None, :]
    hidden = torch.zeros(tokens, context, dtype=torch.bool)
    if causal:
        hidden |= other > own
    if window >= 0:
        hidden |= other < own - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ cells[..., head_size:]).permute(1, 0, 2)


def __getattr__(name: str) -> Any:
    """The backend's class, made when vLLM asks for it: only then may vLLM's own classes be imported."""
    if name == "ReferenceAttentionBackend":
        backend = _make_backend()
        globals()[name] = backend
        return backend
    raise AttributeError(name)


def _make_backend() -> type:
    from vllm.v1.attention.backend import AttentionType, MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
    from vllm.v1.kv_cache_layout import KVCacheLayout

    class ReferenceAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
        """The computation; everything around it is inherited from vLLM's CPU backend."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            unsupported = [
                what
                for what, present in (
                    ("ALiBi", self.alibi_slopes is not None),
                    ("attention sinks", self.sinks is not None),
                    ("a quantised cache", self.is_fp8_kv_cache),
                    (f"attention type {self.attn_type}", self.attn_type != AttentionType.DECODER),
                )
                if present
            ]
            if unsupported:
                raise NotImplementedError(
                    f"the reference attention does not have {', '.join(unsupported)}: unset {SWITCH}"
                )

        def do_kv_cache_update(
            self,
            layer: Any,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
        ) -> None:
            """Store this step's keys and values."""
            write_cells(kv_cache, key, value, slot_mapping)

        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            output_scale: torch.Tensor | None = None,
            output_block_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """Attention of all requests of a step; nothing to do in vLLM's warm-up, which has no metadata."""
            if attn_metadata is None:
                return output
            starts = attn_metadata.query_start_loc.tolist()
            for number, context in enumerate(attn_metadata.seq_lens.tolist()):
                start, end = starts[number], starts[number + 1]
                if start == end:
                    continue
                result = attend(
                    query[start:end],
                    kv_cache,
                    attn_metadata.block_table[number],
                    context=context,
                    head_size=self.head_size,
                    scale=self.scale,
                    causal=bool(attn_metadata.causal),
                    window=_tokens_before(self.sliding_window),
                    softcap=self.logits_soft_cap,
                )
                output[start:end] = result.to(output.dtype).view(output[start:end].shape)
            return output

    class ReferenceAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
        """vLLM's CPU backend with our computation and without its limits."""

        kvshare_cell_encoding: ClassVar[str | None] = None if os.environ.get(SWITCH) == UNDECLARED else "kv-packed"
        """What a cell holds: K then V of one token and one head. Declared, so that nobody has to guess."""

        @staticmethod
        def get_name() -> str:
            """The name under which vLLM knows the backend."""
            return backend_name()

        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
            """All of them; head-major first, which is the default of CPU attention."""
            return tuple(KVCacheLayout)

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            """Any block size that vLLM's inherited bookkeeping takes."""
            return [MultipleOf(16)]

        @staticmethod
        def get_impl_cls() -> type[ReferenceAttentionImpl]:
            """The computation."""
            return ReferenceAttentionImpl

    # vLLM sends the classes between processes by name.
    for made in (ReferenceAttentionImpl, ReferenceAttentionBackend):
        made.__module__ = __name__
        made.__qualname__ = made.__name__
    globals()["ReferenceAttentionImpl"] = ReferenceAttentionImpl
    return ReferenceAttentionBackend


def _tokens_before(sliding_window: Any) -> int:
    """vLLM's window (a size, or a pair whose first entry counts older tokens) as a number of older tokens."""
    if isinstance(sliding_window, tuple):
        return int(sliding_window[0])
    return int(sliding_window) - 1 if sliding_window > 0 else -1
