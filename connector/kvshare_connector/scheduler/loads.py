"""Loads: the ledger of load plans, per request and generation.

Pure. A request id may come back after a preemption or a failed load; the generation keeps a late report about an old
plan from touching a new one. Unknown ids are never an error: an assertion here would kill the engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvshare_connector.scheduler.blocks import KindBlocks, OfKinds


@dataclass(frozen=True)
class LoadPlan(OfKinds):
    """Blocks that all ranks must load for a request.

    Attributes:
        request_id: the request.
        generation: number of this plan among all plans of the engine.
        first_block: number of the first block in the prompt that is promised to the engine.
        count: number of blocks that are promised; a kind may need fewer of them.
        blocks: what must be loaded, kind by kind, in prefix order.
        epoch: resets that had happened when it was planned; after another one nothing of it is proven.
        whole: the load is right as a whole only, and its failure is reported by request; else a part from the first
            block on is a shorter hit, and failures are reported by block.
    """

    request_id: str
    generation: int
    first_block: int
    count: int
    blocks: tuple[KindBlocks, ...]
    epoch: int = 0
    whole: bool = False

    @property
    def length(self) -> int:
        """Blocks that must be read, those of different kinds counted apart."""
        return sum(len(part.numbers) for part in self.blocks)


class Loads:
    """All load plans of one engine that have not been finished by every rank."""

    def __init__(self) -> None:
        self._generation = 0
        self._pending: dict[str, LoadPlan] = {}
        self._sent: dict[str, LoadPlan] = {}
        self._bad: dict[str, int] = {}  # number of blocks before the first bad one, by request

    def plan(
        self,
        request_id: str,
        first_block: int,
        count: int,
        blocks: tuple[KindBlocks, ...],
        epoch: int = 0,
        *,
        whole: bool = False,
    ) -> LoadPlan:
        """Plan a load; it replaces an earlier plan of the request that nobody has seen yet."""
        self._generation += 1
        made = LoadPlan(request_id, self._generation, first_block, count, blocks, epoch, whole)
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
            self._pending[request_id] = replace(plan, count=0, blocks=())

    def take(self) -> tuple[LoadPlan, ...]:
        """The plans to send with this step."""
        taken = tuple(self._pending.values())
        self._sent.update(self._pending)
        self._pending = {}
        return taken

    def invalid(self, block_ids: frozenset[int]) -> None:
        """Some rank could not load these blocks. A rank that is done early says so before the others have finished."""
        if not block_ids:
            return
        for request_id, plan in self._sent.items():
            if plan.whole:
                continue
            good = next((i for i, block_id in enumerate(plan.block_ids) if block_id in block_ids), None)
            if good is not None:
                self._bad[request_id] = min(good, self._bad.get(request_id, good))

    def failed(self, request_ids: Iterable[str]) -> None:
        """Some rank could not load everything for these requests."""
        self._bad.update({request_id: 0 for request_id in request_ids if request_id in self._sent})

    def finish(self, request_ids: Iterable[str]) -> list[tuple[LoadPlan, int]]:
        """All ranks have finished these requests.

        Returns:
            each plan with the number of its blocks before the first one that any rank called invalid.
        """
        done: list[tuple[LoadPlan, int]] = []
        for request_id in request_ids:
            plan = self._sent.pop(request_id, None)
            if plan is not None:
                done.append((plan, self._bad.pop(request_id, plan.count)))
        return done

    def unproven_from(self, request_id: str) -> int | None:
        """First block of a load that has not been finished: from there on the cache holds anything."""
        plan = self._pending.get(request_id) or self._sent.get(request_id)
        return None if plan is None else plan.first_block

    @property
    def in_flight(self) -> int:
        """Plans sent and not finished."""
        return len(self._sent)
