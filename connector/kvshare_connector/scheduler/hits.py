"""Hits: from the store's answers to the usable prefix of a prompt.

Pure, without I/O: the search is a generator that yields batches of keys and is sent the answers. A block of a kind
counts only when every object of it (all shards, all stages) is there. A lookup is a hint; the GET decides.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from kvshare_layout import keys
from kvshare_layout.kinds import Kind, Unknown, longest_hit, needed
from kvshare_layout.objects import ObjectId

#: Blocks per question of phase 1; the last size repeats. Small first, so that a miss costs little.
WINDOWS = (64, 512, 4096)
#: Keys per question of phase 2.
KEYS_PER_CALL = 4096


@dataclass(frozen=True)
class Ask:
    """Keys of one kind to ask for at once."""

    kind: str
    keys: list[str]


#: A search yields keys and is sent one number per key; anything but 1 is a miss. It returns the number of blocks.
Search = Generator[Ask, Sequence[int], int]
#: A kind and the objects that a block of it has.
KindObjects = tuple[Kind, Sequence[ObjectId]]


def representative(block_hash: bytes, objects: Sequence[ObjectId]) -> ObjectId:
    """The object of a block that is asked for first. Chosen by hash, so that load spreads over the store's nodes."""
    return objects[int.from_bytes(block_hash[-4:], "big") % len(objects)]


def search(namespace: str, block_hashes: Sequence[bytes], kinds: Sequence[KindObjects], *, spare: int = 0) -> Search:
    """Find the longest hit in the store, in blocks from the first on.

    Full attention is asked first, for it needs every block. Then windows are asked from the end of what was found
    backwards, and no further than the hit needs, also without its last ``spare`` blocks: a block that is missing moves
    the end in front of it.
    """
    end = len(block_hashes)
    windows: dict[str, KindObjects] = {}
    for kind, objects in kinds:
        if kind.retention.rule == "full":
            end = yield from _leading_blocks(namespace, block_hashes[:end], kind.name, objects)
        else:
            windows[kind.name] = (kind, objects)
    if not windows:
        return end
    return (yield from _with_windows(namespace, block_hashes, end, windows, spare))


def _with_windows(
    namespace: str, block_hashes: Sequence[bytes], end: int, windows: Mapping[str, KindObjects], spare: int
) -> Search:
    """Shorten a hit of ``end`` blocks to the longest for which every window is complete.

    As with full attention one object per block is asked for first, and the others of the blocks that remain.
    """
    kinds = [kind for kind, _ in windows.values()]
    there: dict[tuple[str, int], bool] = {}
    complete: set[tuple[str, int]] = set()
    sizes = iter(WINDOWS)
    more = dict.fromkeys(windows, 0)
    while True:
        found = longest_hit(kinds, end, lambda kind, number: there.get((kind.name, number)), spare=spare)
        if isinstance(found, Unknown):
            kind, objects = windows[found.kind.name]
            # What one window holds; where some of that was missing, more at a time.
            window = found.number + 1 - needed(kind, (found.number + 1) * kind.block_tokens, spare=spare).start
            start = max(0, found.number + 1 - max(window, more[kind.name]))
            more[kind.name] = next(sizes, WINDOWS[-1])
            unknown = [n for n in range(start, found.number + 1) if (kind.name, n) not in there]
            first = {n: representative(block_hashes[n], objects) for n in unknown}
            answers = yield Ask(kind.name, [_key(namespace, block_hashes[n], first[n]) for n in unknown])
            there.update({(kind.name, n): answer == 1 for n, answer in zip(unknown, answers, strict=True)})
            continue
        open_ = [
            (kind, objects, number)
            for kind, objects in windows.values()
            for number in needed(kind, found * kind.block_tokens, spare=spare)
            if len(objects) > 1 and (kind.name, number) not in complete
        ]
        if not open_:
            return found
        kind, objects, _ = open_[0]
        blocks_per_call = max(1, KEYS_PER_CALL // (len(objects) - 1))
        part = [number for other, _, number in open_ if other is kind][-blocks_per_call:]
        others = {n: [o for o in objects if o != representative(block_hashes[n], objects)] for n in part}
        answers = yield Ask(kind.name, [_key(namespace, block_hashes[n], o) for n in part for o in others[n]])
        each = len(objects) - 1
        for i, number in enumerate(part):
            complete.add((kind.name, number))
            there[kind.name, number] = all(answer == 1 for answer in answers[i * each : (i + 1) * each])


def _leading_blocks(namespace: str, block_hashes: Sequence[bytes], kind: str, objects: Sequence[ObjectId]) -> Search:
    """Find how many blocks of one kind from the first on are complete in the store.

    Phase 1 asks for one object per block in growing windows up to the first miss; eviction is not monotone along a
    prefix, so there is no bisection. Phase 2 asks for the other objects of the blocks found.
    """
    found = 0
    start = 0
    size = iter(WINDOWS)
    window = next(size)
    while start < len(block_hashes):
        part = block_hashes[start : start + window]
        answers = yield Ask(kind, [_key(namespace, h, representative(h, objects)) for h in part])
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
        rest = [_key(namespace, h, o) for h in part for o in objects if o != representative(h, objects)]
        answers = yield Ask(kind, rest)
        complete = _leading(answers) // others
        if complete < len(part):
            return start + complete
    return found


def _key(namespace: str, block_hash: bytes, id_: ObjectId) -> str:
    return keys.object_key(namespace, block_hash, id_.kind, id_.shard, id_.stage)


def _leading(answers: Sequence[int]) -> int:
    """Number of answers before the first that is not 1."""
    return next((i for i, answer in enumerate(answers) if answer != 1), len(answers))
