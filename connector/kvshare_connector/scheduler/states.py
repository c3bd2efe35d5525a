"""States: which recurrent states can be saved in a step.

Pure. The engine writes the state of a sequence over and over into one block, and leaves it behind at some block ends. A
block table does not say which of its blocks hold a state that is over, so only what the engine hands over is saved, in
the step that hands it over.
"""

from collections.abc import Callable, Sequence

from kvshare_connector.scheduler.blocks import KindBlocks
from kvshare_connector.scheduler.tables import KindGroups

#: What the engine hands over: cache group, block of the cache, and tokens that the state in it stands for.
Handed = tuple[int, int, int]


def to_save(
    kinds: KindGroups,
    handed: Sequence[Handed],
    hashes: Sequence[bytes],
    ready_tokens: int,
    wanted: Callable[[int, bytes, str], bool],
) -> tuple[KindBlocks, ...]:
    """The states that can be saved, one block for each end of a block that all groups of a kind have handed over.

    Args:
        kinds: the kinds and their cache groups.
        handed: what the engine hands over in this step for one request.
        hashes: hashes of the request's blocks.
        ready_tokens: tokens whose values are accepted and whose states exist after this step.
        wanted: whether block ``number`` with a hash is to be saved for a kind.
    """
    out: list[KindBlocks] = []
    for kind, groups in zip(kinds.kinds, kinds.groups, strict=True):
        if kind.retention.rule != "state":
            continue
        places: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in handed:
            # States inside a block belong to hashes that we do not ask for.
            whole = tokens % kind.block_tokens == 0 and 0 < tokens <= min(ready_tokens, len(hashes) * kind.block_tokens)
            if group in groups and whole and not kinds.is_null(block_id):
                places.setdefault(tokens // kind.block_tokens - 1, {})[group] = block_id
        numbers = [
            number
            for number, by_group in sorted(places.items())
            if len(by_group) == len(groups) and wanted(number, hashes[number], kind.name)
        ]
        if numbers:
            tables = tuple(tuple(places[number][group] for number in numbers) for group in groups)
            out.append(KindBlocks(kind.name, tuple(numbers), tuple(hashes[n] for n in numbers), tables))
    return tuple(out)
