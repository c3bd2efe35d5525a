"""Planning: what of a request becomes a save job in a step, and what is promised to those who listen for events."""

from collections.abc import Sequence
from typing import Any

from kvshare_connector import compat
from kvshare_connector.counters import Counters
from kvshare_connector.scheduler import states
from kvshare_connector.scheduler.announcements import Announcements, StoredBlock
from kvshare_connector.scheduler.pins import Pins
from kvshare_connector.scheduler.saves import SaveJob, Saves
from kvshare_connector.scheduler.tables import KindGroups, Tables


class Planning:
    """Plans the saves of one engine.

    Args:
        saves: progress of saving by request.
        block_tokens: tokens of a block.
        announcements: what is told about blocks, None while nobody listens.
        counters: counts blocks that are given up.
    """

    def __init__(
        self, saves: Saves, block_tokens: int, announcements: Announcements | None, counters: Counters
    ) -> None:
        self._saves, self._block_tokens, self._announcements, self._counters = (
            saves,
            block_tokens,
            announcements,
            counters,
        )

    def job(
        self,
        request: Any,
        ready_tokens: int,
        tables: Tables,
        handed: Sequence[states.Handed],
        *,
        kinds: KindGroups,
        pins: Pins,
    ) -> SaveJob | None:
        """A save job for what became ready, pinned; None when there is nothing or no room for it.

        Args:
            request: the engine's request.
            ready_tokens: tokens whose values are accepted and whose KV exists after this step.
            tables: its block tables, one for each cache group.
            handed: the recurrent states that the engine hands over in this step.
            kinds: the kinds and their cache groups.
            pins: what is pinned.
        """
        hashes = request.block_hashes

        def wanted(number: int, block_hash: bytes, kind: str) -> bool:
            return self._saves.allowed(number, request.num_prompt_tokens) and self._saves.wanted(block_hash, kind)

        # The engine hands a state over once, so states have the room first.
        passing, room = states.to_save(kinds, handed, hashes, ready_tokens, wanted), pins.room
        if sum(len(part.block_ids) for part in passing) > room:
            self._counters.add("dropped_save_blocks", sum(len(part.numbers) for part in passing))
            passing = ()
        room -= sum(len(part.block_ids) for part in passing)
        numbers = self._saves.next_blocks(
            request.request_id,
            ready_tokens=min(ready_tokens, kinds.shortest(tables) * self._block_tokens),
            prompt_tokens=request.num_prompt_tokens,
            hashes=hashes,
        )
        blocks, left = kinds.to_save(tables, hashes, numbers, self._saves.wanted, room)
        if left:
            # Packed blocks are released within milliseconds: the request's next step, or its end, tries again.
            self._saves.put_back(request.request_id, left[0])
            if request.is_finished():
                self._counters.add("dropped_save_blocks", len(left))
        if not (blocks or passing):
            return None
        job = self._saves.job((*blocks, *passing))
        pins.pin(job.job_id, job.block_ids)
        if self._announcements is not None and blocks and blocks[0].kind == kinds.kinds[0].name:
            self._announcements.planned(job.job_id, [self._described(request, n) for n in blocks[0].numbers])
        return job

    def _described(self, request: Any, number: int) -> StoredBlock:
        """A block of a request as an event describes it."""
        start, end = number * self._block_tokens, (number + 1) * self._block_tokens
        parent = bytes(request.block_hashes[number - 1]) if number else None
        tokens = tuple(request.all_token_ids[start:end])
        return StoredBlock(bytes(request.block_hashes[number]), parent, tokens, compat.extra_keys(request, start, end))
