"""Data parallel: several engines in one pod share one cache, and each speaks under its own number."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvshare_layout import MemberReport
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


def engine_of(local_rank: int | None, *, rank: int = 0, size: int = 1) -> Callable[[Any], None]:
    """Configure an engine as vLLM's process for one data-parallel rank does."""

    def change(config: Any) -> None:
        parallel = config.parallel_config
        parallel.data_parallel_rank_local, parallel.data_parallel_rank = local_rank, rank
        parallel.data_parallel_size, parallel.data_parallel_index = size, rank

    return change


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, played: Any) -> "list[MemberReport]":
    """What engines report to the operator."""
    assert played
    from kvshare_connector.scheduler.reporter import Reporter

    found: list[Any] = []
    monkeypatch.setattr(Reporter, "post", lambda _, report: found.append(report))
    return found


def test_engines_of_one_pod_share_and_report_under_their_own_number(
    world: "World", engines: "Callable[..., Engine]", reports: "list[MemberReport]"
) -> None:
    """A4: a dense model's ranks are independent, an expert model's keep their place; neither is in the fingerprint."""
    alone = engines(world, "a", tp=2)
    dense = engines(world, "b", change=engine_of(1))
    experts = engines(world, "c", change=engine_of(2, rank=6, size=8))
    first = engines(world, "d", change=engine_of(0, rank=4, size=8))
    assert [report.engine_index for report in reports] == [0, 1, 2, 0]
    assert len({report.fingerprint for report in reports}) == 1
    alone.ask(PROMPT)
    assert [engine.ask(PROMPT) for engine in (dense, experts, first)] == [48, 48, 48]
    assert world.check_store() == 48


def test_a_number_beyond_what_a_report_can_say_is_cut(
    world: "World", engines: "Callable[..., Engine]", reports: "list[MemberReport]"
) -> None:
    """A report that the operator refuses would show the pod as silent."""
    from kvshare_layout.reports import from_json, to_json

    engines(world, "a", change=engine_of(500))
    assert from_json(to_json(reports[0])).engine_index == 63
