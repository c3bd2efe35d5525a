"""Blocks of full attention in one cache group: what most tests move."""

from collections.abc import Sequence

from kvshare_connector.scheduler.blocks import KindBlocks
from kvshare_connector.scheduler.loads import LoadPlan
from kvshare_connector.scheduler.saves import SaveJob


def full(numbers: Sequence[int], hashes: Sequence[bytes], block_ids: Sequence[int]) -> tuple[KindBlocks, ...]:
    """Blocks of one kind."""
    return (KindBlocks("full", tuple(numbers), tuple(hashes), (tuple(block_ids),)),)


def load_plan(
    request_id: str, generation: int, hashes: Sequence[bytes], block_ids: Sequence[int], epoch: int = 0
) -> LoadPlan:
    """A plan to load blocks from the first on."""
    blocks = full(range(len(hashes)), hashes, block_ids)
    return LoadPlan(request_id, generation, 0, len(hashes), blocks, epoch)


def save_job(
    job_id: int, epoch: int, numbers: Sequence[int], hashes: Sequence[bytes], block_ids: Sequence[int]
) -> SaveJob:
    """A job to save blocks."""
    return SaveJob(job_id, epoch, full(numbers, hashes, block_ids))
