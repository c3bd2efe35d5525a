"""Hits: from the store's answers to the usable prefix of a prompt.

Pure, without I/O: the search is a generator that yields batches of keys and is sent the answers. A block counts only
when every object of it (all shards, all stages) is there. A lookup is a hint; the GET decides.
"""

from collections.abc import Generator, Sequence

from kvshare_layout import keys
from kvshare_layout.objects import ObjectId

#: Blocks per question of phase 1; the last size repeats. Small first, so that a miss costs little.
WINDOWS = (64, 512, 4096)
#: Keys per question of phase 2.
KEYS_PER_CALL = 4096

#: A search yields keys and is sent one number per key; anything but 1 is a miss. It returns the number of blocks.
Search = Generator[list[str], Sequence[int], int]


def representative(block_hash: bytes, objects: Sequence[ObjectId]) -> ObjectId:
    """The object of a block that is asked for first. Chosen by hash, so that load spreads over the store's nodes."""
    return objects[int.from_bytes(block_hash[-4:], "big") % len(objects)]


def search(namespace: str, block_hashes: Sequence[bytes], objects: Sequence[ObjectId]) -> Search:
    """Find how many blocks from the first on are complete in the store.

    Phase 1 asks for one object per block in growing windows up to the first miss; eviction is not monotone along a
    prefix, so there is no bisection. Phase 2 asks for the other objects of the blocks found.
    """
    found = 0
    start = 0
    size = iter(WINDOWS)
    window = next(size)
    while start < len(block_hashes):
        part = block_hashes[start : start + window]
        answers = yield [_key(namespace, h, representative(h, objects)) for h in part]
        hit = _leading(answers)
        found = start + hit
        if hit < len(part):
            break
        start += len(part)
        window = next(size, window)
    others = len(objects) - 1
    if others == 0 or found == 0:
        return found
    blocks_per_call = max(1, KEYS_PER_CALL // others)
    for start in range(0, found, blocks_per_call):
        part = block_hashes[start : min(found, start + blocks_per_call)]
        answers = yield [_key(namespace, h, o) for h in part for o in objects if o != representative(h, objects)]
        complete = _leading(answers) // others
        if complete < len(part):
            return start + complete
    return found


def _key(namespace: str, block_hash: bytes, id_: ObjectId) -> str:
    return keys.object_key(namespace, block_hash, id_.kind, id_.shard, id_.stage)


def _leading(answers: Sequence[int]) -> int:
    """Number of answers before the first that is not 1."""
    return next((i for i, answer in enumerate(answers) if answer != 1), len(answers))
