"""What a person may choose for the demo, read once from the environment."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

KV_HEADS = 4
"""KV heads of the demo's model."""

QUERY_HEADS = 8


class SettingsError(Exception):
    """Mistakes in the demo's variables, all of them, one a line."""


@dataclass(frozen=True)
class Settings:
    """The demo's choices.

    Attributes:
        prefill_sizes: tensor-parallel sizes of the pool's prefill side; the smallest one runs.
        decode_sizes: the same for decode.
        existing_cluster: use the cluster of KUBECONFIG instead of a new one.
        image_registry: where the product's images are, for an existing cluster.
        vllm_image: an image with vLLM and Mooncake, for an existing cluster.
        gpu_resource: name of the resource that engines ask for, one for each rank; none when empty.
    """

    prefill_sizes: tuple[int, ...] = (4, 2)
    decode_sizes: tuple[int, ...] = (1,)
    existing_cluster: bool = False
    image_registry: str = ""
    vllm_image: str = ""
    gpu_resource: str = ""

    @property
    def prefill_tp(self) -> int:
        """Size of the prefill engine that runs."""
        return min(self.prefill_sizes)

    @property
    def decode_tp(self) -> int:
        """Size of the decode engine that runs."""
        return min(self.decode_sizes)

    @property
    def store_tp(self) -> int:
        """The Store TP size that the pool must arrive at: the least common multiple of the effective sizes."""
        return math.lcm(*(min(size, KV_HEADS) for size in (*self.prefill_sizes, *self.decode_sizes)))

    @property
    def refused_tp(self) -> int:
        """A size that the pool must refuse: 3, which fits no Store TP of this model."""
        return 3


def from_environment(variables: Mapping[str, str]) -> Settings:
    """Read PREFILL, DECODE, CLUSTER, IMAGE_REGISTRY, VLLM_IMAGE and GPU_RESOURCE.

    Raises:
        SettingsError: with every mistake.
    """
    mistakes: list[str] = []
    prefill = _sizes("PREFILL", variables.get("PREFILL") or "4,2", mistakes)
    decode = _sizes("DECODE", variables.get("DECODE") or "1", mistakes)
    cluster = variables.get("CLUSTER") or "new"
    if cluster not in {"new", "existing"}:
        mistakes.append(f"CLUSTER is `{cluster}`; expected `new` or `existing`")
    if cluster == "existing":
        mistakes += [
            f"CLUSTER=existing needs {name}: {what}"
            for name, what in (
                ("KUBECONFIG", "the file that leads to the cluster"),
                ("IMAGE_REGISTRY", "where the images kvshare-operator and kvshare-connector are"),
                ("VLLM_IMAGE", "an image with vLLM and Mooncake"),
            )
            if not variables.get(name)
        ]
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return Settings(
        prefill_sizes=prefill,
        decode_sizes=decode,
        existing_cluster=cluster == "existing",
        image_registry=variables.get("IMAGE_REGISTRY", ""),
        vllm_image=variables.get("VLLM_IMAGE", ""),
        gpu_resource=variables.get("GPU_RESOURCE", ""),
    )


def _sizes(name: str, text: str, mistakes: list[str]) -> tuple[int, ...]:
    """Sizes from `4,2`; a size that the demo's model cannot be split by is a mistake."""
    sizes = []
    for word in text.split(","):
        size = int(word) if word.strip().isdecimal() else 0
        if size not in (1, 2, 4, 8):
            mistakes.append(
                f"{name}={text}: `{word}` is no tensor-parallel size of the demo's model, which has "
                f"{QUERY_HEADS} query heads and {KV_HEADS} KV heads; give a list such as {name}=4,2 of 1, 2, 4, 8"
            )
        sizes.append(size)
    return tuple(dict.fromkeys(sizes))
