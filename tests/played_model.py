"""The model that a played engine has: a shape, the tokens that it answers, and the bytes that each token leaves.

Every byte follows from the tokens so far, so whatever a cache or a store holds is known in advance.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)

HASH_ALGORITHM = "sha256_cbor"
VOCABULARY = 100


@dataclass(frozen=True)
class Shape:
    """A model as far as its cache is concerned.

    Attributes:
        layers: hidden layers, each with a cache.
        kv_heads: total KV heads.
        block_tokens: tokens of a block.
        cell: bytes of one head and one token, K and V together.
        draft_layers: further layers with the same cache behind the hidden ones, of a draft model on the last stage.
        windows: tokens that each layer attends to, repeated over all layers; 0 for all tokens, as when it is empty.
        latent: the configuration is that of a model with latents and sparse attention.
    """

    layers: int = 4
    kv_heads: int = 4
    block_tokens: int = 4
    cell: int = 8
    draft_layers: int = 0
    windows: tuple[int, ...] = ()
    latent: bool = False

    def window(self, layer: int) -> int:
        """Tokens that a layer attends to, 0 for all."""
        return self.windows[layer % len(self.windows)] if self.windows else 0


class Text:
    """A prompt and what this model answers to it, with the bytes that each token leaves in a cache.

    Args:
        prompt: tokens.
        flavour: what besides the tokens decides about the bytes, such as an adapter or a picture.
    """

    def __init__(self, prompt: Sequence[int], flavour: int = 0) -> None:
        self._tokens, self._flavour = list(prompt), flavour
        self._hashes: list[int] = []

    def tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens: the prompt, then the answer."""
        while len(self._tokens) < count:
            self._tokens.append((self._hash(len(self._tokens) - 1) >> 17) % VOCABULARY + 3)
        return self._tokens[:count]

    def _hash(self, position: int) -> int:
        """A number that stands for all tokens up to ``position``."""
        while len(self._hashes) <= position:
            before = self._hashes[-1] if self._hashes else 88172645463325252 + self._flavour
            token = self.tokens(len(self._hashes) + 1)[-1]
            self._hashes.append((before * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 64))
        return self._hashes[position]

    def cells(self, start: int, end: int, layer: int, heads: range, cell: int) -> npt.NDArray[np.uint8]:
        """Bytes of the tokens from ``start`` to ``end``: uint8 ``[heads, tokens, cell]``."""
        prefix = np.array([self._hash(p) for p in range(start, end)], dtype=np.uint64)[None, :, None]
        head = np.arange(heads.start, heads.stop, dtype=np.uint64)[:, None, None]
        byte = np.arange(cell, dtype=np.uint64)[None, None, :]
        with np.errstate(over="ignore"):
            place = head * np.uint64(0x9E3779B97F4A7C15) + byte * np.uint64(0xC2B2AE3D27D4EB4F)
            mixed = (prefix ^ (place + np.uint64(layer * 104729 + 1))) * np.uint64(0xFF51AFD7ED558CCD)
        out: npt.NDArray[np.uint8] = (mixed >> np.uint64(40)).astype(np.uint8)
        return out


class WrongBytesError(AssertionError):
    """A cache or a stored object holds other bytes than its tokens give."""


def write_model(folder: Path, shape: Shape) -> Path:
    """A model's folder: configuration and a weights file, enough for vLLM's configuration."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 32,
        "num_hidden_layers": shape.layers, "num_attention_heads": 32, "num_key_value_heads": shape.kv_heads,
        "head_dim": 2, "vocab_size": 256, "max_position_embeddings": 4096, "torch_dtype": "float32",
    }  # fmt: skip
    if shape.latent:
        config |= {
            "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "kv_lora_rank": 6,
            "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2, "q_lora_rank": 8, "index_topk": 64,
            "index_n_heads": 4, "index_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 32,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(256)))
    return folder


def vllm_config(folder: Path, shape: Shape) -> Any:
    """vLLM's real configuration of such a model on the CPU; copies of it are changed for every engine."""
    cache = CacheConfig(
        block_size=shape.block_tokens, enable_prefix_caching=True, prefix_caching_hash_algo=HASH_ALGORITHM
    )
    return VllmConfig(
        model_config=ModelConfig(
            model=str(write_model(folder, shape)), skip_tokenizer_init=True, dtype="float32", max_model_len=2048
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=64, max_num_seqs=8, max_model_len=2048, is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVShareConnector", kv_connector_module_path="kvshare_connector.connector",
            kv_role="kv_both", kv_load_failure_policy="recompute",
        ),
    )  # fmt: skip


class Backend:
    """An attention backend whose cells are K then V."""

    @staticmethod
    def get_name() -> str:
        """As vLLM's own."""
        return "FLASH_ATTN"
