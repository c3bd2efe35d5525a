"""What in a store no pool refers to any more: keys and references in, judged rows out.

Why this exists: deleting is the one thing that cannot be taken back, so what may be deleted is decided here, on plain
values, by one rule that a reader can check: a row is `old` only when its prefix is a pool's of this cluster, of a
generation below the pool's, and nothing refers to it. Knows no store and no cluster.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from kvshare_layout import keys
from kvshare_layout.errors import LayoutError

State = Literal["inUse", "old", "doubtful"]
MANIFEST: Final = "manifest"
"""Stands where a fingerprint stands, for the one object of a prefix that has none."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """Something that refers to a prefix: `pool ns/name` or `pod ns/name`."""

    prefix: str
    by: str


@dataclasses.dataclass(frozen=True)
class Group:
    """The keys of one namespace in the store, or the manifest of a prefix.

    Attributes:
        prefix: pool prefix.
        fingerprint: last part of the namespace, or `manifest`.
        samples: one key of each size: objects of one namespace with the same suffix are equally large.
        counts: number of keys by suffix.
    """

    prefix: str
    fingerprint: str
    samples: Mapping[str, str]
    counts: Mapping[str, int]

    @property
    def objects(self) -> int:
        """Number of keys."""
        return sum(self.counts.values())


@dataclasses.dataclass(frozen=True)
class Row:
    """One group, judged. ``pool`` is `ns/name` of the pool whose prefix it is; empty for none of this cluster."""

    group: Group
    pool: str
    state: State
    reason: str
    message: str

    @property
    def generation(self) -> int:
        """Generation in the prefix."""
        return generation_of(self.group.prefix)


def generation_of(prefix: str) -> int:
    """Return the generation in a pool prefix."""
    return int(prefix.rpartition("/g")[2])


def prefix_of(namespace: str) -> str:
    """Return the pool prefix at the beginning of a namespace or of a prefix; empty when there is none."""
    text = "/".join(namespace.split("/")[:3])
    return text if keys.is_pool_prefix(text) else ""


def group_keys(found: Iterable[str]) -> tuple[tuple[Group, ...], int]:
    """Sort keys by namespace; return the groups, and how many keys are not of our grammar and stay untouched."""
    samples: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    foreign = 0
    for key in found:
        place = _place(key)
        if place is None:
            foreign += 1
            continue
        prefix, fingerprint, suffix = place
        samples[prefix, fingerprint].setdefault(suffix, key)
        counts[prefix, fingerprint][suffix] += 1
    groups = tuple(Group(*where, samples[where], counts[where]) for where in sorted(samples))
    return groups, foreign


def _place(key: str) -> tuple[str, str, str] | None:
    prefix, _, last = key.rpartition("/")
    if last == MANIFEST:
        return (prefix, MANIFEST, last) if keys.is_pool_prefix(prefix) else None
    try:
        namespace = keys.parse_object_key(key)[0]
    except LayoutError:
        return None
    prefix, _, fingerprint = namespace.rpartition("/")
    return (prefix, fingerprint, last) if keys.is_pool_prefix(prefix) else None


def judge(groups: Sequence[Group], pools: Iterable[Reference], others: Iterable[Reference]) -> tuple[Row, ...]:
    """Judge every group. ``pools`` are the prefixes of pools, ``others`` what pods and statuses refer to."""
    present = {one.prefix: one.by for one in pools}
    identities = {_identity(prefix): by for prefix, by in present.items()}
    newest = {by: generation_of(prefix) for prefix, by in present.items()}
    referring: dict[str, list[str]] = collections.defaultdict(list)
    for other in others:
        referring[other.prefix].append(other.by)
    rows = []
    for group in groups:
        pool = identities.get(_identity(group.prefix), "")
        name = pool.removeprefix("pool ")
        if group.prefix in present:
            rows.append(Row(group, name, "inUse", "PoolRefers", f"the cache of {pool}"))
        elif by := referring.get(group.prefix):
            more = f" and {len(by) - 1} more" if len(by) > 1 else ""
            rows.append(Row(group, name, "inUse", "MemberRefers", f"{min(by)}{more} still uses it"))
        elif not pool:
            text = "no pool of this cluster has this prefix; another cluster or an engine set up by hand may"
            rows.append(Row(group, "", "doubtful", "NoPool", text))
        elif generation_of(group.prefix) < (now := newest[pool]):
            rows.append(Row(group, name, "old", "OldGeneration", f"{pool} is at generation {now}, no pod uses this"))
        else:
            text = f"{pool} is at generation {now} and may come to this one; an earlier pool of its name left it"
            rows.append(Row(group, name, "doubtful", "NewerGeneration", text))
    return tuple(rows)


def _identity(prefix: str) -> str:
    return prefix.rpartition("/")[0]


def pattern(prefix: str) -> str:
    """Return the regular expression (ECMAScript) of all keys of ours under a pool prefix, and of no other key."""
    start = prefix.replace(".", "\\.")
    return f"^{start}/([fi]-[0-9a-f]+/[0-9a-f]+/k[a-z][a-z0-9-]*s[0-9]+p[0-9]+|{MANIFEST})$"
