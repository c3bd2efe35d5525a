"""Speculative decoding of a played engine: the configuration that vLLM makes of a method."""

from collections.abc import Callable
from typing import Any


def drafting(method: str = "ngram", *, tokens: int = 3, **more: Any) -> Callable[[Any], None]:
    """Configure speculative decoding; methods with a draft model are as real as an engine without a model allows."""

    def change(config: Any) -> None:
        from vllm.config import SpeculativeConfig

        config.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=tokens, prompt_lookup_max=3,
            target_model_config=config.model_config, target_parallel_config=config.parallel_config,
        )  # fmt: skip
        config.speculative_config.method = method
        for name, value in more.items():
            setattr(config.speculative_config, name, value)

    return change
