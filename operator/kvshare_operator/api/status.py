"""The status of a KVSharePool: what the operator found, and how a stored one is read back.

Why this exists: the status is written by the controller alone and read by everything else; damage to it must
never stop a pool. What a user wants is in ``pool``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import Field

from kvshare_operator.api.schema import Count, StrictModel

_STATUS_INT: Final[dict[str, Any]] = {"format": "int32"}


class Members(StrictModel):
    """How many pods, by what they reported."""

    total: Count = Field(default=0, description="Pods that opted in and are not over.")
    shared: Count = Field(default=0, description="Members that share.")
    isolated: Count = Field(default=0, description="Members with a namespace of their own.")
    disabled: Count = Field(default=0, description="Members without any cache of ours.")
    unreported: Count = Field(default=0, description="Injected members that have not reported.")
    outdated: Count = Field(default=0, description="Members of an older revision, with the same cache.")
    not_injected: Count = Field(default=0, description="Pods that opted in and were not injected.")


class Fingerprint(StrictModel):
    """One group of members whose bytes are compatible."""

    id: str = Field(min_length=1, max_length=32, description="Begin of the fingerprint.")
    members: Count = Field(description="Members that keep it.")
    tensor_parallel_sizes: list[Count] | None = Field(
        default=None,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Tensor-parallel sizes of these members.",
    )
    layouts: list[Annotated[str, Field(min_length=1, max_length=16)]] | None = Field(
        default=None,
        max_length=8,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Memory layouts of these members.",
    )
    differing_fields: list[Annotated[str, Field(min_length=1, max_length=64)]] | None = Field(
        default=None,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Fields in which this group differs from the largest one.",
    )


class Problem(StrictModel):
    """One cause at one owner."""

    owner: str = Field(min_length=1, max_length=320, description="Who owns the pods, for example deployment/llama.")
    pods: Count = Field(description="How many pods.")
    reason: str = Field(min_length=1, max_length=64, description="Reason code.")
    message: str = Field(default="", max_length=512, description="The cause, and what to do.")


class Condition(StrictModel):
    """A condition as Kubernetes writes them."""

    type: str = Field(min_length=1, max_length=316)
    status: Literal["True", "False", "Unknown"]
    reason: str = Field(min_length=1, max_length=128)
    message: str = Field(max_length=4096)
    last_transition_time: str = Field(max_length=64, json_schema_extra={"format": "date-time"})
    observed_generation: int | None = Field(default=None, json_schema_extra={"format": "int64"})


class Status(StrictModel):
    """What the operator found."""

    observed_generation: int | None = Field(
        default=None, json_schema_extra={"format": "int64"}, description="Generation of the spec that this is about."
    )
    store_tp_size: int | None = Field(
        default=None, json_schema_extra=_STATUS_INT, description="Store TP: into how many shards a block is cut."
    )
    kv_heads: int | None = Field(
        default=None, json_schema_extra=_STATUS_INT, description="KV heads of the model, from the spec or from members."
    )
    cache_namespace: str | None = Field(
        default=None, min_length=1, max_length=128, description="Begin of all keys of this pool in the store."
    )
    revision: str | None = Field(
        default=None, min_length=1, max_length=63, description="Hash over what members get; members carry theirs."
    )
    connector_image: str | None = Field(
        default=None, min_length=1, max_length=512, description="Payload image; changes with the spec only."
    )
    members: Members | None = None
    fingerprints: list[Fingerprint] | None = Field(
        default=None,
        max_length=8,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"]},
        description="Groups of members with compatible bytes; more than one do not hit each other's blocks.",
    )
    problems: list[Problem] | None = Field(
        default=None,
        max_length=20,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Members that do not share, by owner and reason.",
    )
    conditions: list[Condition] | None = Field(
        default=None,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        description="Accepted, StoreTPResolved, StoreReachable, MembersConsistent, Ready.",
    )


def read_status(raw: object) -> Status:
    """Read ``status``; what does not fit the model is dropped field by field, never an error.

    A status is the operator's own; damage to it must not stop a pool.
    """
    if not isinstance(raw, dict):
        return Status()
    kept: dict[str, Any] = {}
    for name, field in Status.model_fields.items():
        alias = field.alias or name
        if alias in raw:
            try:
                Status.model_validate({alias: raw[alias]})
            except pydantic.ValidationError:
                continue
            kept[alias] = raw[alias]
    return Status.model_validate(kept)
