"""Keys as members write them, for tests of `kvshare purge`."""

from __future__ import annotations

from kvshare_layout import keys


def prefix_at(generation: int, pool: str = "p1", namespace: str = "ns-a") -> str:
    """Pool prefix of a pool for model `org/m`."""
    return keys.pool_prefix(namespace, pool, "org/m", None, generation)


def block_keys(prefix: str, blocks: int, *, fingerprint: str = "ab" * 16, shards: int = 2) -> list[str]:
    """Keys of some blocks, each in several shards, and the manifest."""
    namespace = keys.namespace(prefix, fingerprint)
    made = [
        keys.object_key(namespace, number.to_bytes(32, "big"), "full", shard, 0)
        for number in range(blocks)
        for shard in range(shards)
    ]
    return [*made, keys.manifest_key(prefix)]
