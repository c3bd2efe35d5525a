"""Pipeline parallelism for vLLM on CPU, which it otherwise stops with an assertion.

Ranks after the first lack the tensors into which they receive the hidden states; this makes them. Switched on
by the variable `PIPELINE_ON_CPU=1`; vLLM finds `register` through the entry point `vllm.general_plugins`, in
every process.
"""

import os
from typing import Any

SWITCH = "PIPELINE_ON_CPU"


def register() -> None:
    """Mend vLLM's model runner in this process, once, when the switch is on."""
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(original, "mended", False):
        return

    def with_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    with_tensors.mended = True  # type: ignore[attr-defined]
    GPUModelRunner.sync_and_gather_intermediate_tensors = with_tensors
