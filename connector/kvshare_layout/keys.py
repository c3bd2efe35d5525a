"""Keys: the strings under which objects live in the store.

``<pool prefix>/<fingerprint>/<block hash>/k<kind>s<shard>p<stage>``. Pure string building; every function here is
injective over its valid arguments, and ``parse_object_key`` is the proof.
"""

import hashlib
import json
import re

from kvshare_layout.errors import LayoutError

#: Version of everything that keys and objects mean. A change of the format is a change of this string.
FORMAT = "kvs1"

#: The pool prefix of connectors that nobody configured.
DEFAULT_POOL_PREFIX = f"{FORMAT}/p-default/g1"

#: Largest generation of a pool: what its digits in a prefix can hold.
MAX_GENERATION = 9_999_999_999

_PREFIX = re.compile(r"kvs1/p-[a-z0-9][a-z0-9.-]{0,62}/g[1-9][0-9]{0,9}")
_FINGERPRINT = re.compile(r"[fi]-[0-9a-f]{16,64}")
_KIND = re.compile(r"[a-z][a-z0-9-]{0,30}")
_OBJECT = re.compile(
    r"(?P<namespace>kvs1/p-[^/]+/g\d+/[fi]-[0-9a-f]+)/(?P<block>[0-9a-f]+)"
    r"/k(?P<kind>[a-z][a-z0-9-]*)s(?P<shard>\d+)p(?P<stage>\d+)"
)


def pool_prefix(kube_namespace: str, pool: str, model: str, revision: str | None, generation: int) -> str:
    """Prefix of a pool's keys, ``kvs1/p-<12 hex>/g<generation>``; the same after the pool is re-created.

    Only names enter it. Two pools whose names, models or revisions differ in any character get different prefixes
    (up to a collision of 48 bits of SHA-256; the fingerprint behind the prefix still keeps bytes apart).
    """
    if not 1 <= generation <= MAX_GENERATION:
        raise LayoutError(f"generation {generation} given, 1 to {MAX_GENERATION} expected")
    text = json.dumps([kube_namespace, pool, model, revision], separators=(",", ":"), ensure_ascii=True)
    return f"{FORMAT}/p-{hashlib.sha256(text.encode()).hexdigest()[:12]}/g{generation}"


def is_pool_prefix(text: str) -> bool:
    """Whether ``text`` has the form of a pool prefix."""
    return _PREFIX.fullmatch(text) is not None


def namespace(prefix: str, fingerprint: str, *, isolated: bool = False) -> str:
    """The prefix that all keys of compatible members share; isolated members get a letter of their own."""
    text = f"{'i' if isolated else 'f'}-{fingerprint}"
    if not is_pool_prefix(prefix) or not _FINGERPRINT.fullmatch(text):
        raise LayoutError(
            f"pool prefix {prefix!r} with fingerprint {fingerprint!r} given, kvs1/p-NAME/gN and hex expected"
        )
    return f"{prefix}/{text}"


def object_suffix(kind: str, shard: int, stage: int) -> str:
    """The last part of a key: ``k<kind>s<shard>p<stage>``. Kinds are named by what they are."""
    if not _KIND.fullmatch(kind) or shard < 0 or stage < 0:
        raise LayoutError(
            f"kind {kind!r}, shard {shard}, stage {stage} given, a lower-case name and numbers >= 0 expected"
        )
    return f"k{kind}s{shard}p{stage}"


def object_key(namespace: str, block_hash: bytes, kind: str, shard: int, stage: int) -> str:
    """Key of one canonical object."""
    return f"{namespace}/{block_hash.hex()}/{object_suffix(kind, shard, stage)}"


def group_id(namespace: str, block_hash: bytes) -> str:
    """Store group of all objects of a block: they share leases and leave together."""
    return f"{namespace}/{block_hash.hex()}"


def manifest_key(prefix: str) -> str:
    """Key of the diagnosis object of a pool: the first member's manifest, under no fingerprint."""
    return f"{prefix}/manifest"


def parse_object_key(key: str) -> tuple[str, bytes, str, int, int]:
    """Take a key apart again: namespace, block hash, kind, shard, stage.

    Raises:
        LayoutError: not an object key of this format.
    """
    match = _OBJECT.fullmatch(key)
    if match is None or len(match["block"]) % 2:
        raise LayoutError(f"{key!r} given, <pool prefix>/<fingerprint>/<block hash>/k<kind>s<shard>p<stage> expected")
    return (
        match["namespace"],
        bytes.fromhex(match["block"]),
        match["kind"],
        int(match["shard"]),
        int(match["stage"]),
    )
