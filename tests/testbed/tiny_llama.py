"""The recipe of a tiny Llama with random weights: nothing is downloaded, and its answers never change.

Four layers, eight query heads of size 32, a byte-level tokenizer, float32 (bfloat16 flips tokens when a cache
was written by another tensor-parallel size). The weight matrices are made four times as large as the usual
initialisation, otherwise greedy output is one repeated token.

This file stands alone, so that a pod of any vLLM image can run it: `python tiny_llama.py FOLDER`.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

RECIPE = 1
"""To be raised when the code below makes other weights from the same parameters."""

VOCABULARY = 256 + 2
"""One token for each byte, then begin and end of text."""


@dataclass(frozen=True)
class TinyModel:
    """The parameters that make one model.

    Attributes:
        layers: hidden layers.
        query_heads: attention heads.
        kv_heads: heads of the KV cache; must divide `query_heads`.
        head_size: elements of a head.
        max_tokens: longest context.
        seed: two seeds make two models of the same shapes.
        dtype: name of the weights' type.
    """

    layers: int = 4
    query_heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    max_tokens: int = 4096
    seed: int = 20
    dtype: str = "float32"


def make_model(folder: Path, parameters: TinyModel) -> None:
    """Write configuration, tokenizer and weights into a new folder."""
    import torch
    import transformers

    folder.mkdir(parents=True)
    dtype = getattr(torch, parameters.dtype)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=parameters.query_heads * parameters.head_size,
        intermediate_size=2 * parameters.query_heads * parameters.head_size,
        num_hidden_layers=parameters.layers,
        num_attention_heads=parameters.query_heads,
        num_key_value_heads=parameters.kv_heads,
        head_dim=parameters.head_size,
        max_position_embeddings=parameters.max_tokens,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
    )
    config.dtype = dtype
    random_state = torch.random.get_rng_state()
    torch.manual_seed(parameters.seed)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 2:
                weights.mul_(4)
    torch.random.set_rng_state(random_state)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer whose token numbers are the bytes of the text."""
    letters = _byte_letters()
    vocabulary: dict[str, int] = {letter: byte for byte, letter in enumerate(letters)}
    special = [
        {
            "id": 256 + number,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, content in enumerate(("<begin>", "<end>"))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<begin>",
        "eos_token": "<end>",
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_letters() -> list[str]:
    """The printable letter by which byte-level tokenizers write each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(plain))
    return [letters[byte] for byte in range(256)]


def main() -> None:
    """Make the default model in the given folder, unless it is there already."""
    parser = argparse.ArgumentParser(prog="python tiny_llama.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kv-heads", type=int, default=TinyModel.kv_heads)
    given = parser.parse_args()
    if not (given.folder / "config.json").exists():
        make_model(given.folder, TinyModel(kv_heads=given.kv_heads))


if __name__ == "__main__":
    main()
