"""States: the recurrent state of a layer without attention, and whether its bytes are known.

vLLM 0.30 to 0.33 give such a layer one tensor of pages ``[B, 1, 1, C]``: in each block that it keeps, the states of the
layer (for example of a convolution and of a delta rule) one behind the other. What they mean depends on the kernels, so
the encoding names everything that chooses among those; a page is moved whole, and only between equals.
"""

from math import prod
from typing import Any

import torch

from kvshare_connector.worker.setting import Setting
from kvshare_layout.facts import UNKNOWN

#: What the fields of a specification must say: states at the ends of blocks, none of drafts, one part for each rank.
_FIELDS = {
    "mamba_cache_mode": "align", "num_speculative_blocks": 0, "tp_replicated": False, "num_heads": 1,
    "tokens_per_state": -1,
}  # fmt: skip


def state_encoding(spec: Any, backend: Any, layer: Any, view: torch.Tensor, setting: Setting) -> str:
    """Encoding id of the states of a layer.

    Args:
        spec: its specification.
        backend: its attention backend class.
        layer: the layer.
        view: uint8 ``[B, 1, 1, C]`` where the cache is as expected.
        setting: what its kernels depend on.
    """
    shapes, dtypes = tuple(getattr(spec, "shapes", ())), tuple(getattr(spec, "dtypes", ()))
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=False))
    facts = [
        ("specification", type(spec).__name__, "MambaSpec"),
        *((name, getattr(spec, name, "no such field"), wanted) for name, wanted in _FIELDS.items()),
        ("page", list(view.shape[1:]), [1, 1, size]),
        ("kernels", setting.kernels or "nothing", setting.kernels or "their names"),
    ]
    wrong = [f"{name} {given} given, {wanted} expected" for name, given, wanted in facts if given != wanted]
    if wrong:
        return f"{UNKNOWN}{'; '.join(wrong)}"
    kind = getattr(getattr(spec, "mamba_type", None), "name", "unnamed").lower()
    states = "+".join(
        f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    names = (kind, getattr(backend, "__name__", "none"), type(layer).__name__, setting.kernels, states)
    return f"state:{':'.join(names)}"
