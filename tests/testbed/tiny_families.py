"""Tiny random models of other families than Llama: one latent head (MLA), windows or states beside full attention.

Each is made once and kept in the cache. The tokenizer is the default tiny model's, whose tokens are bytes.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed import places
from testbed.prepare.step import key_of
from testbed.tiny_llama import VOCABULARY
from testbed.tiny_model import tiny_model

LAYERS = 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 4096,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def tiny_deepseek() -> Path:
    """A DeepSeek V2 with multi-head latent attention and dense layers only."""

    def make() -> Any:
        import transformers

        config = transformers.DeepseekV2Config(
            **COMMON,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=LAYERS,
            n_routed_experts=2,
            n_shared_experts=1,
            num_experts_per_tok=1,
            moe_intermediate_size=64,
        )
        return transformers.DeepseekV2ForCausalLM(config)

    return _kept("deepseek", make)


def tiny_gemma() -> Path:
    """A Gemma 3 whose layers alternate between a window of 128 tokens and full attention."""

    def make() -> Any:
        import transformers

        config = transformers.Gemma3TextConfig(
            **COMMON,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        )
        return transformers.Gemma3ForCausalLM(config)

    return _kept("gemma", make)


def tiny_gpt_oss() -> Path:
    """A gpt-oss with windows of 128 tokens beside full attention, attention sinks and two experts."""

    def make() -> Any:
        import transformers

        config = transformers.GptOssConfig(
            **COMMON,
            hidden_size=256,
            intermediate_size=256,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            sliding_window=128,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        )
        return transformers.GptOssForCausalLM(config)

    return _kept("gpt-oss", make)


STATES_IN_FLOAT32 = "--mamba-ssm-cache-dtype=float32"
"""What vLLM chooses by itself on processors with AVX-512 BF16; on others states, and so blocks, would be smaller."""


def tiny_qwen_next() -> Path:
    """A Qwen3-Next whose layers alternate between a recurrent state and full attention."""

    def make() -> Any:
        import transformers

        config = transformers.Qwen3NextConfig(
            **COMMON,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"] * (LAYERS // 2),
        )
        return transformers.Qwen3NextForCausalLM(config)

    return _kept("qwen-next", make)


def _kept(name: str, make: Callable[[], Any]) -> Path:
    """The folder of a model; made when it is not in the cache."""
    folder = places.MODELS / f"tiny-{name}-{key_of(Path(__file__))}"
    if folder.exists():
        return folder
    import torch

    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    random_state = torch.random.get_rng_state()
    torch.manual_seed(20)
    model = make().to(torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 2:
                weights.mul_(4)
    torch.random.set_rng_state(random_state)
    model.config.dtype = torch.float32
    model.save_pretrained(unfinished)
    (unfinished / "model.safetensors").chmod(0o644)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model() / file, unfinished / file)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(unfinished)
    return folder
