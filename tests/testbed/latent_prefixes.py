"""Prefix caching for latent attention (MLA) on processors where vLLM turns it off.

vLLM's CPU kernels have no prefill of a prompt whose beginning is cached, unless the processor has matrix tiles. They
do read a cache for decoding, and a prompt of which all but the last token is cached is just that: with such prompts
only, latent caches can be shared on any processor. Switched on by the variable `LATENT_PREFIXES=1`; vLLM finds
`register` through the entry point `vllm.general_plugins`, in every process.
"""

import os
from typing import Any

SWITCH = "LATENT_PREFIXES"


def register() -> None:
    """Keep prefix caching as it was asked for, once, when the switch is on."""
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config
    if getattr(original, "kept", False):
        return

    def check(vllm_config: Any) -> None:
        wanted = vllm_config.cache_config.enable_prefix_caching
        original(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = wanted

    check.kept = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = staticmethod(check)
