"""Saves: which newly finished blocks of which request become save jobs.

Pure. A block may be saved when its last token has been computed and accepted and its hash is known. Prompt blocks are
planned in the step that computes them; decode blocks when their tokens are known; the tail of a finished request in the
step after it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvshare_connector.scheduler.blocks import KindBlocks, OfKinds


@dataclass(frozen=True)
class SaveRule:
    """Which blocks a role saves, see the table of roles in the documentation.

    Attributes:
        prompt: blocks that lie completely inside the prompt.
        decode: blocks with at least one decoded token.
    """

    prompt: bool
    decode: bool

    @staticmethod
    def of(role: str, save_decode_cache: bool, kv_role: str) -> "SaveRule":
        """The rule of a pool role; ``kv_producer`` is set by hand and never saves decode blocks."""
        if kv_role == "kv_producer" or role == "prefill":
            return SaveRule(prompt=True, decode=False)
        if role == "decode":
            return SaveRule(prompt=save_decode_cache, decode=save_decode_cache)
        return SaveRule(prompt=True, decode=save_decode_cache)


@dataclass(frozen=True)
class SaveJob(OfKinds):
    """Blocks that all ranks must save, a slice of one request.

    Attributes:
        job_id: number of the job.
        epoch: resets that had happened when it was planned; older jobs are void.
        blocks: what must be saved, kind by kind.
    """

    job_id: int
    epoch: int
    blocks: tuple[KindBlocks, ...]


class Offered:
    """Blocks that this engine has offered to the store, or read from it: bounded, oldest forgotten first.

    A block of a window may be in the store while the same block of full attention is not, and the other way round, so
    what has been offered is remembered by hash and kind.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self._limit = limit
        self._seen: OrderedDict[bytes, frozenset[str]] = OrderedDict()

    def has(self, block_hash: bytes, kind: str) -> bool:
        """Whether a block of a kind need not be saved again."""
        return kind in self._seen.get(block_hash, ())

    def add(self, hashes: Iterable[bytes], kinds: frozenset[str]) -> None:
        """Remember blocks of these kinds."""
        for block_hash in hashes:
            seen = self._seen.get(block_hash)
            self._seen[block_hash] = kinds if seen is None or seen <= kinds else seen | kinds
            self._seen.move_to_end(block_hash)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def discard(self, hashes: Iterable[bytes]) -> None:
        """Forget blocks that did not arrive, whatever their kind: saving one again costs less than missing it."""
        for block_hash in hashes:
            self._seen.pop(block_hash, None)

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()


class Saves:
    """Progress of saving, per request.

    Args:
        rule: which blocks to save.
        block_tokens: tokens of a block.
        offered: blocks that need not be saved again.
    """

    def __init__(self, rule: SaveRule, block_tokens: int, offered: Offered) -> None:
        self._rule, self._block_tokens, self._offered = rule, block_tokens, offered
        self._done: dict[str, int] = {}
        self._job = 0
        self.epoch = 0

    def next_blocks(
        self, request_id: str, *, ready_tokens: int, prompt_tokens: int, hashes: Sequence[bytes]
    ) -> list[int]:
        """Numbers of the blocks that may be saved now, each once per residence of the request, unless put back.

        Args:
            request_id: the request.
            ready_tokens: tokens from the start whose values are accepted and whose KV exists after this step.
            prompt_tokens: tokens of the prompt.
            hashes: block hashes known so far.
        """
        full = min(ready_tokens // self._block_tokens, len(hashes))
        start = self._done.get(request_id, 0)
        if full <= start:
            return []
        self._done[request_id] = full
        return [number for number in range(start, full) if self.allowed(number, prompt_tokens)]

    def allowed(self, number: int, prompt_tokens: int) -> bool:
        """Whether the rule lets block ``number`` be saved."""
        return self._rule.prompt if (number + 1) * self._block_tokens <= prompt_tokens else self._rule.decode

    def put_back(self, request_id: str, number: int) -> None:
        """There was no room for block ``number`` and what follows: ``next_blocks`` returns them again."""
        self._done[request_id] = number

    def wanted(self, block_hash: bytes, kind: str) -> bool:
        """Whether a block of a kind has not been offered yet."""
        return not self._offered.has(block_hash, kind)

    def job(self, blocks: Sequence[KindBlocks]) -> SaveJob:
        """Make a job of blocks that ``next_blocks`` returned."""
        self._job += 1
        for part in blocks:
            self._offered.add(part.block_hashes, frozenset({part.kind}))
        return SaveJob(self._job, self.epoch, tuple(blocks))

    def rewind(self, request_id: str) -> None:
        """The request lost its blocks (preemption): start again; what has been offered stays so."""
        self._done.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._done.pop(request_id, None)

    def reset(self) -> None:
        """The cache was emptied: jobs planned until now are void, everything may be offered again."""
        self.epoch += 1
        self._done.clear()
        self._offered.clear()
