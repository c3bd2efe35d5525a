"""KVSharePool v1alpha1: the models of spec and whole object, with their bounds and CEL rules.

Why this exists: one definition of the resource. The API server gets it as a structural schema (``crd``),
the operator and the command line read objects through it. Rules that CEL can say stand beside the field as
``cel(...)``; what follows from several sizes together (Store TP, namespace) is decided in ``core.pool``
through ``kvshare_layout``. Nothing here knows a cluster.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import pydantic
from pydantic import Field

from kvshare_operator.api.schema import MAX_SIZE, SET, Quantity, Size, Sizes, StrictModel, cel, quantity_rule, rules
from kvshare_operator.api.status import Status

ADDRESS_PATTERN: Final = (
    r"^(([a-z0-9]([-a-z0-9.]*[a-z0-9])?|\[[0-9a-f:]+\]):[0-9]{1,5}"
    r"|etcd://([a-z0-9]([-a-z0-9.]*[a-z0-9])?|\[[0-9a-f:]+\]):[0-9]{1,5}"
    r"(,([a-z0-9]([-a-z0-9.]*[a-z0-9])?|\[[0-9a-f:]+\]):[0-9]{1,5})*)$"
)
TEXT_PATTERN: Final = r"^[A-Za-z0-9_.,:/=@%+-]+$"
"""Strings that reach an engine's command line: no blanks, quotes, braces or shell characters."""

_ALL_SIZES: Final = (
    "({0}.prefill.tensorParallelSizes"
    " + (has({0}.decode) ? {0}.decode.tensorParallelSizes : [])"
    " + (has({0}.reservedTensorParallelSizes) ? {0}.reservedTensorParallelSizes : []))"
)


class Model(StrictModel):
    """Which weights the pool is for. These are claims; the members' fingerprint covers what they really load."""

    model_config = pydantic.ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.name == oldSelf.name && has(self.revision) == has(oldSelf.revision)"
                " && (!has(self.revision) || self.revision == oldSelf.revision)",
                "name and revision are immutable: other weights need another pool, or a higher model.generation",
            )
        )
    )
    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=TEXT_PATTERN,
        description="Name of the model, as members give it to vLLM.",
    )
    revision: str | None = Field(
        default=None, min_length=1, max_length=128, pattern=TEXT_PATTERN, description="Revision of the model."
    )
    paths: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        default=None,
        max_length=8,
        json_schema_extra=SET,
        description="Local paths that mean these weights, for example /mnt/models.",
    )
    generation: int = Field(
        default=1,
        ge=1,
        le=2147483647,
        description="Generation of the weights; raise it when new weights appear under the same name.",
        json_schema_extra=rules(cel("self >= oldSelf", "generation only grows"), format="int32"),
    )
    kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SIZE,
        description="Total KV heads of the model, if known; members report it otherwise. 1 for MLA.",
        json_schema_extra={"format": "int32"},
    )


class Prefill(StrictModel):
    """Deployments that compute prompts."""

    tensor_parallel_sizes: Sizes = Field(description="Tensor-parallel sizes of the prefill deployments.")


class Decode(StrictModel):
    """Deployments that generate."""

    tensor_parallel_sizes: Sizes = Field(description="Tensor-parallel sizes of the decode deployments.")
    save_decode_cache: Literal["Enabled", "Disabled"] = Field(
        default="Disabled",
        description="Whether decode members also store what they compute themselves and generate; Disabled: nothing.",
    )


class Cache(StrictModel):
    """Fields that decide stored bytes."""

    model_config = pydantic.ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.blockSizeTokens == oldSelf.blockSizeTokens && self.hashAlgorithm == "
                "oldSelf.hashAlgorithm && has(self.dtype) == has(oldSelf.dtype) && (!has(self.dtype) || "
                "self.dtype == oldSelf.dtype)",
                "cache fields decide stored bytes and are immutable: make another pool",
            )
        )
    )
    block_size_tokens: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="Tokens of a block; becomes --block-size of members that set none. DeepSeek V3.2 needs 64.",
        json_schema_extra={"format": "int32"},
    )
    dtype: str | None = Field(
        default=None,
        min_length=1,
        max_length=32,
        pattern=TEXT_PATTERN,
        description="KV-cache dtype that members must use (--kv-cache-dtype). Unset: not compared.",
    )
    hash_algorithm: Literal["sha256", "sha256_cbor"] = Field(
        default="sha256_cbor", description="Prefix hash algorithm of every member."
    )


class External(StrictModel):
    """A Mooncake store that somebody else runs."""

    master_address: str = Field(
        min_length=1,
        max_length=280,
        pattern=ADDRESS_PATTERN,
        description="host:port, [ipv6]:port, or etcd://host:port,... of a replicated master. A host without "
        "dots is a Service of the pool's namespace.",
    )
    metadata_server: str = Field(
        default="P2PHANDSHAKE",
        min_length=1,
        max_length=280,
        pattern=TEXT_PATTERN,
        description="Mooncake's metadata server.",
    )


class Managed(StrictModel):
    """A Mooncake store that the operator runs."""

    nodes: int = Field(default=1, ge=1, le=256, description="Store nodes.", json_schema_extra={"format": "int32"})
    capacity_per_node: Quantity = Field(
        description="Cache memory of each node.", json_schema_extra=quantity_rule("256Mi")
    )
    image: str | None = Field(default=None, min_length=1, max_length=512, description="Image with Mooncake's programs.")
    node_selector: dict[str, Annotated[str, Field(max_length=63)]] | None = Field(
        default=None, max_length=8, description="Where store nodes may run."
    )


class Rdma(StrictModel):
    """What RDMA members get beside the protocol."""

    resource_name: str = Field(
        min_length=3,
        max_length=253,
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$",
        description="Device-plugin resource that members request, for example rdma/hca.",
    )
    resource_count: int = Field(
        default=1,
        ge=1,
        le=64,
        description="How many of them, for each pod.",
        json_schema_extra={"format": "int32"},
    )
    ipc_lock: Literal["Enabled", "Disabled"] = Field(
        default="Enabled",
        description="Add the capability IPC_LOCK, which the restricted pod security standard forbids.",
    )


class Store(StrictModel):
    """Where blocks are kept."""

    model_config = pydantic.ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.type == 'External' ? has(self.external) && !has(self.managed)"
                " : has(self.managed) && !has(self.external)",
                "set exactly the member that type names",
            ),
            cel("self.type == oldSelf.type", "type is immutable"),
            cel("!has(self.rdma) || self.protocol == 'RDMA'", "rdma needs protocol RDMA"),
        )
    )
    type: Literal["External", "Managed"] = Field(description="Who runs the store.")
    protocol: Literal["TCP", "RDMA"] = Field(default="TCP", description="How bytes travel.")
    external: External | None = Field(default=None, description="With type External.")
    managed: Managed | None = Field(default=None, description="With type Managed.")
    rdma: Rdma | None = Field(default=None, description="With protocol RDMA.")


class SecretName(StrictModel):
    """A reference to a Secret in the pod's namespace."""

    name: str = Field(min_length=1, max_length=253, description="Name of the Secret.")


class Connector(StrictModel):
    """How the connector's code gets into members."""

    source: Literal["InitContainer", "ImageVolume", "Image"] = Field(
        default="InitContainer",
        description="InitContainer copies it, ImageVolume mounts it, Image means the engine's image has it.",
    )
    image: str | None = Field(
        default=None, min_length=1, max_length=512, description="Payload image; default: the chart's."
    )
    image_pull_secrets: list[SecretName] | None = Field(
        default=None,
        max_length=8,
        description="Added to members, for the payload image.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    staging_memory_per_rank: Quantity = Field(
        default="256Mi",
        description="Staging memory of each rank.",
        json_schema_extra=quantity_rule("16Mi"),
    )
    verify: Literal["Size", "Checksum"] = Field(
        default="Size",
        description="What proves a load: result and exact size; or a digest stored with every block, too.",
    )
    on_existing_connector: Literal["Refuse", "Compose", "Replace"] = Field(
        default="Refuse",
        description="What to do with a pod that already configures a KV connector.",
    )


class Spec(StrictModel):
    """What the user wants."""

    model_config = pydantic.ConfigDict(
        json_schema_extra=rules(
            cel(
                f"!has(self.storeTPSize) || {_ALL_SIZES.format('self')}.all(t, self.storeTPSize % t == 0 || "
                "(t % self.storeTPSize == 0 && has(self.model.kvHeads) && self.model.kvHeads == "
                "self.storeTPSize))",
                "storeTPSize must be a multiple of every listed size (sizes above model.kvHeads: equal to "
                "model.kvHeads)",
            ),
            cel(
                f"!has(self.model.kvHeads) || {_ALL_SIZES.format('self')}.all(t, self.model.kvHeads % t == 0 "
                "|| t % self.model.kvHeads == 0)",
                "vLLM cannot split model.kvHeads over one of these sizes",
            ),
            cel(
                "!has(self.storeTPSize) || !has(self.model.kvHeads) || self.model.kvHeads % self.storeTPSize == 0",
                "storeTPSize must divide model.kvHeads",
            ),
        )
    )
    model: Model
    prefill: Prefill
    decode: Decode | None = None
    reserved_tensor_parallel_sizes: Sizes | None = Field(
        default=None, description="Sizes that will be added later: they join Store TP now."
    )
    pipeline_parallel_sizes: Annotated[list[Size], Field(max_length=4)] = Field(
        default=[1],
        min_length=1,
        json_schema_extra=SET,
        description="Pipeline-parallel sizes of all members.",
    )
    store_tp_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SIZE,
        description="Pins Store TP. Changing it starts an empty cache.",
        json_schema_extra={"format": "int32"},
    )
    cache: Cache = Cache()
    store: Store
    connector: Connector = Connector()
    on_conflict: Literal["Skip", "Reject"] = Field(
        default="Skip",
        description="What happens to a pod that cannot be injected: start as it was, or be denied.",
    )

    def listed_sizes(self) -> tuple[int, ...]:
        """All tensor-parallel sizes that join Store TP, sorted, without repeats."""
        decode = self.decode.tensor_parallel_sizes if self.decode else []
        reserved = self.reserved_tensor_parallel_sizes or []
        return tuple(sorted({*self.prefill.tensor_parallel_sizes, *decode, *reserved}))

    def sizes_for(self, role: str) -> tuple[int, ...]:
        """Tensor-parallel sizes that a pod of ``role`` (prefill, decode, both) may have."""
        prefill = set(self.prefill.tensor_parallel_sizes)
        decode = set(self.decode.tensor_parallel_sizes) if self.decode else set()
        chosen = {"prefill": prefill, "decode": decode}.get(role, prefill | decode)
        return tuple(sorted(chosen | set(self.reserved_tensor_parallel_sizes or [])))


_S: Final = "self.status.storeTPSize"
_KNOWN_HEADS: Final = (
    f"((has(self.spec.model.kvHeads) && self.spec.model.kvHeads == {_S})"
    f" || (!has(self.spec.model.kvHeads) && has(self.status.kvHeads) && self.status.kvHeads == {_S}))"
)


class Pool(StrictModel):
    """The whole object as the API server keeps it; ``metadata`` is left to Kubernetes."""

    model_config = pydantic.ConfigDict(
        json_schema_extra=rules(
            cel(
                "size(self.metadata.name) <= 63 && !self.metadata.name.contains('.')",
                "name becomes a label value and part of Service names: at most 63 characters, no dots",
            ),
            cel(
                f"!has(self.status) || !has({_S}) || has(self.spec.storeTPSize) || "
                f"{_ALL_SIZES.format('self.spec')}.all(t, {_S} % t == 0 || (t % {_S} == 0 && {_KNOWN_HEADS}))",
                "these sizes would move Store TP away from status.storeTPSize, which starts a new, empty "
                "cache; if that is wanted, set spec.storeTPSize",
            ),
        )
    )
    spec: Spec
    status: Status | None = None


class SpecError(ValueError):
    """A pool object that breaks the rules of its schema.

    Attributes:
        mistakes: `(field path, sentence)` for every mistake.
    """

    def __init__(self, mistakes: tuple[tuple[str, str], ...]) -> None:
        self.mistakes = mistakes
        super().__init__("; ".join(f"{field}: {text}" for field, text in mistakes))


def _mistakes(error: pydantic.ValidationError, root: str) -> tuple[tuple[str, str], ...]:
    out = []
    for item in error.errors(include_url=False):
        path = root + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in item["loc"])
        given = "" if item["type"] == "missing" else f", {item['input']!r} given"
        out.append((path, f"{item['msg']}{given}"[:300]))
    return tuple(out)


def read_spec(raw: object, *, unknown_keys: Literal["ignore", "forbid"] = "ignore") -> Spec:
    """Read ``spec`` of a stored object or of a user's file.

    Objects stored under looser rules (a size 0, a list written as text, a bool) raise SpecError with every
    mistake; they are never read as something else. ``unknown_keys="forbid"`` is for people's files.
    """
    try:
        spec = Spec.model_validate(raw, extra=unknown_keys)
    except pydantic.ValidationError as error:
        raise SpecError(_mistakes(error, "spec")) from error
    mistakes = []
    if spec.store.type == "External" and (spec.store.external is None or spec.store.managed is not None):
        mistakes.append(("spec.store", "type External needs `external` and no `managed`"))
    if spec.store.type == "Managed" and (spec.store.managed is None or spec.store.external is not None):
        mistakes.append(("spec.store", "type Managed needs `managed` and no `external`"))
    if spec.store.rdma is not None and spec.store.protocol != "RDMA":
        mistakes.append(("spec.store.rdma", "protocol RDMA is needed"))
    if mistakes:
        raise SpecError(tuple(mistakes))
    return spec
