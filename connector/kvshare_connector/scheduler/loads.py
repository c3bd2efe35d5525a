"""Loads: the ledger of load plans, per request and generation.

Pure. A request id may come back after a preemption or a failed load; the generation keeps a late report about an old
plan from touching a new one. Unknown ids are never an error: an assertion here would kill the engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadPlan:
    """Blocks that all ranks must load for a request.

    Attributes:
        request_id: the request.
        generation: number of this plan among all plans of the engine.
        first_block: number of the first block in the prompt.
        block_hashes: hashes of the blocks, in prefix order.
        block_ids: where they go in the cache.
    """

    request_id: str
    generation: int
    first_block: int
    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


class Loads:
    """All load plans of one engine that have not been finished by every rank."""

    def __init__(self) -> None:
        self._generation = 0
        self._pending: dict[str, LoadPlan] = {}
        self._sent: dict[str, LoadPlan] = {}

    def plan(
        self, request_id: str, first_block: int, hashes: tuple[bytes, ...], block_ids: tuple[int, ...]
    ) -> LoadPlan:
        """Plan a load; it replaces an earlier plan of the request that nobody has seen yet."""
        self._generation += 1
        made = LoadPlan(request_id, self._generation, first_block, hashes, block_ids)
        self._pending[request_id] = made
        return made

    def drop(self, request_id: str) -> None:
        """Zero external tokens: nothing must be loaded for this request. A plan already sent runs to its end."""
        self._pending.pop(request_id, None)

    def void(self, request_id: str) -> None:
        """The request has ended while its plan was not sent: send it without blocks.

        The engine waits for every rank to report a request whose load it has begun, so the plan must still go out.
        """
        if plan := self._pending.get(request_id):
            self._pending[request_id] = LoadPlan(request_id, plan.generation, plan.first_block, (), ())

    def take(self) -> tuple[LoadPlan, ...]:
        """The plans to send with this step."""
        taken = tuple(self._pending.values())
        self._sent.update(self._pending)
        self._pending = {}
        return taken

    def finish(self, request_ids: Iterable[str], invalid_block_ids: frozenset[int]) -> list[tuple[LoadPlan, int]]:
        """All ranks have finished these requests.

        Returns:
            each plan with the number of its blocks before the first invalid one.
        """
        done: list[tuple[LoadPlan, int]] = []
        for request_id in request_ids:
            plan = self._sent.pop(request_id, None)
            if plan is not None:
                good = next((i for i, b in enumerate(plan.block_ids) if b in invalid_block_ids), len(plan.block_ids))
                done.append((plan, good))
        return done

    @property
    def in_flight(self) -> int:
        """Plans sent and not finished."""
        return len(self._sent)
