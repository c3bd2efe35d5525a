"""What a pool resolves to: Store TP, cache namespace, store address, and everything that is wrong with it.

Why this exists: the controller, the webhook and `kvshare plan` must come to the same answer from the same
object. The arithmetic is ``kvshare_layout``'s; here it meets the resource's fields and what the status
remembers (Store TP is sticky, the number of KV heads may have been learnt). No cluster, no clock.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from typing import Literal

from kvshare_layout import heads, keys
from kvshare_layout.errors import LayoutError
from kvshare_operator.api.pool import Spec
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.api.status import Status
from kvshare_operator.core.store import identity

Source = Literal["pinned", "lcm", "sticky"]


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The answer.

    Attributes:
        store_tp: S, normalised as far as the number of KV heads is known; None with ``mistakes``.
        source: where S comes from.
        provisional: True while the number of KV heads is unknown.
        kv_heads: total KV heads, declared or reported; None while unknown.
        cache_namespace: pool prefix of all keys.
        master_address: store address as every member gets it; None when the spec names no store.
        warnings: sentences about what works but may surprise.
        mistakes: what keeps the pool from being used, worst first.
    """

    store_tp: int | None
    source: Source
    provisional: bool
    kv_heads: int | None
    cache_namespace: str
    master_address: str | None
    warnings: tuple[str, ...] = ()
    mistakes: tuple[Refusal, ...] = ()


def resolve(namespace: str, name: str, spec: Spec, status: Status | None = None) -> Resolution:
    """Resolve a pool. ``status`` is what the operator wrote last; None for a plan from a file."""
    remembered = status or Status()
    kv_heads = spec.model.kv_heads or remembered.kv_heads
    mistakes: list[Refusal] = []
    store_tp: int | None = None
    source: Source = "lcm"
    provisional = kv_heads is None
    try:
        found = heads.resolve_store_tp(spec.listed_sizes(), kv_heads=kv_heads, pinned=spec.store_tp_size)
        store_tp, source, provisional = found.size, found.source, found.provisional
        kept = remembered.store_tp_size
        if source == "lcm" and kept is not None and (stuck := _stuck(kept, spec, kv_heads)) is not None:
            if stuck != store_tp:
                source = "sticky"
            store_tp = stuck
    except LayoutError as error:
        mistakes.append(refusal("StoreTPConflict", problem="; ".join(error.mistakes)))
    address: str | None = None
    warnings: list[str] = []
    if spec.store.external is not None:
        address, warnings, wrong = full_address(spec.store.external.master_address, namespace)
        mistakes.extend(refusal("SpecInvalid", problem=problem) for problem in wrong)
    elif spec.store.managed is not None:
        address = identity.master_address(namespace, name)
    if provisional and store_tp is not None:
        warnings.append(
            f"Store TP {store_tp} is provisional: model.kvHeads is not declared and no member has reported it"
        )
    return Resolution(
        store_tp=store_tp,
        source=source,
        provisional=provisional,
        kv_heads=kv_heads,
        cache_namespace=keys.pool_prefix(namespace, name, spec.model.name, spec.model.revision, spec.model.generation),
        master_address=address,
        warnings=tuple(warnings),
        mistakes=tuple(mistakes),
    )


def _stuck(kept: int, spec: Spec, kv_heads: int | None) -> int | None:
    """Return the remembered Store TP, normalised, if every listed size still fits it; else None."""
    sizes = spec.listed_sizes()
    if kv_heads is None:
        return kept if all(kept % size == 0 for size in sizes) else None
    try:
        size = heads.normalise_store_tp(kept, kv_heads)
    except LayoutError:
        return None
    return size if all(size % heads.effective_tp(tp, kv_heads) == 0 for tp in sizes) else None


def full_address(address: str, namespace: str) -> tuple[str, list[str], list[str]]:
    """Return (address as members get it, warnings, mistakes).

    A host without dots becomes `host.NAMESPACE.svc`; addresses in brackets and `etcd://` lists are kept.
    """
    if address.startswith("etcd://"):
        return address, [], [m for part in address[7:].split(",") for m in _port_mistakes(part)]
    mistakes = _port_mistakes(address)
    if mistakes or address.startswith("["):
        return address, [], mistakes
    host, _, port = address.rpartition(":")
    if _is_address(host):
        warning = (
            f"store.external.masterAddress {address} is an IP address: if it is a pod's, it changes when the "
            "master restarts; use a Service name"
        )
        return address, [warning], []
    if "." not in host and host != "localhost":
        return f"{host}.{namespace}.svc:{port}", [], []
    return address, [], []


def _port_mistakes(address: str) -> list[str]:
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:]+\]|[^:\[\]]+):(\d{1,5})", address)
    if match is None:
        return [f"store.external.masterAddress: {address!r} given, host:port expected (an IPv6 address in brackets)"]
    if not 1 <= int(match[1]) <= 65535:
        return [f"store.external.masterAddress: port {match[1]} given, 1 to 65535 expected"]
    return []


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
