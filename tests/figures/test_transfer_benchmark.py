"""The transfer benchmark: it judges what it measured, and is silent about wrong bytes."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import costs, endtoend, run, transfers
from bench.page import aims, write_page
from bench.plots import draw
from bench.rank import Rank, Shape, WrongBytesError, prove
from bench.rounds import Ratio, interleaved, ratio
from kvshare_connector.store.memory import MemoryStore
from kvshare_connector.store.protocol import Segments
from physical import LAYOUTS


def _case(layout: str, layer_bytes: int, one: float, vllm: float | None) -> dict[str, Any]:
    theirs = None if vllm is None else Ratio(vllm, vllm - 1, vllm + 1)
    width = layer_bytes // 16 // 512
    return transfers.Case(
        layout, 16, width, "save", True, 1.5, Ratio(one, one - 0.1, one + 0.1), theirs, layer_bytes
    ).row()


def _result(*cases: dict[str, Any]) -> dict[str, Any]:
    machine = {"date": "2026-11-30", "cores": 2, "processor": "a processor", "load": 0.1, "versions": "torch 2"}
    lookup = {
        "tokens": 1024, "keys": 256, "calls": 3, "thread_microseconds": 90.0, "longest_microseconds": 50.0,
        "answer_milliseconds": 9.0,
    }  # fmt: skip
    memory = {"arena_bytes": 256 << 20, "parts": 4, "objects": {2 << 20: 32}, "device_bytes": 96 << 20}
    return {"machine": machine, "rounds": 5, "transfers": list(cases), "lookups": [lookup], "memory": memory}


def test_rounds_alternate_and_their_ratios_keep_the_spread() -> None:
    """The first round warms up; a ratio is taken inside a round."""
    order: list[str] = []
    times = {"a": iter([9.0, 2.0, 4.0, 6.0]), "b": iter([9.0, 1.0, 1.0, 2.0])}

    def competitor(name: str) -> float:
        order.append(name)
        return next(times[name])

    found = interleaved({"a": lambda: competitor("a"), "b": lambda: competitor("b")}, 3)
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert found == {"a": [2.0, 4.0, 6.0], "b": [1.0, 1.0, 2.0]}
    assert ratio(found["a"], found["b"]) == Ratio(3.0, 2.0, 4.0)
    with pytest.raises(ValueError, match="no rounds"):
        ratio([], [])


def test_aims_are_judged_case_by_case() -> None:
    """Which cases an aim is about follows from layout and bytes of a layer; the worst one is named.

    An aim that not even one segment reaches is out of reach of any code, and the page says so.
    """
    cases = [
        _case("LBNHC", 8 << 10, 1.0, 40.0),
        _case("LBNHC", 64 << 10, 1.5, 12.0),
        _case("LBHNC", 16 << 10, 1.11, 2.5),
        _case("LBHNC", 64 << 10, 1.2, 0.9),
        _case("BHLNC", 8 << 10, 1.0, None),
    ]
    found = [(aim.reached, aim.cases, aim.worst, aim.best_possible) for aim in aims(cases)]
    assert found == [(1, 2, 12.0, 1), (1, 1, 2.5, 1), (0, 1, 0.9, 1), (3, 5, 1.5, None)]


def test_the_page_and_its_plots_come_from_the_figures_alone(tmp_path: Path) -> None:
    """The same figures give the same files, byte for byte."""
    pytest.importorskip("matplotlib")
    result = _result(_case("LBNHC", 8 << 10, 1.04, 40.0), _case("BHLNC", 8 << 10, 1.0, None))
    page = write_page(result)
    assert "| LBNHC | 16 | 1 | save | direct | 1.50 | 1.04 (0.94 to 1.14) | 40 (39 to 41) |" in page
    assert "| BHLNC | 16 | 1 | save | direct | 1.50 | 1.00 (0.90 to 1.10) | - |" in page
    assert "| 1024 | 256 | 3 | 90 | 50 | 9 |" in page
    assert "A part takes 32 objects of 2048 KiB. Packing" in page
    assert "## Requests" not in page
    for case in result["transfers"]:
        result["transfers"] = [*result["transfers"], {**case, "operation": "load"}]
    first = [file.read_bytes() for file in draw(result, tmp_path)]
    assert [file.read_bytes() for file in draw(result, tmp_path)] == first
    assert len(first) == 2
    assert all(b"<svg" in data for data in first)


class Corrupting(MemoryStore):
    """A store that keeps another byte than the one it was given."""

    def get_many(self, keys: Sequence[str], segments: Sequence[Segments]) -> list[int]:
        """The first byte of the last object is another one."""
        answers = super().get_many(keys, segments)
        address = segments[-1][0][0]
        ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 1, 1)
        return answers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [MemoryStore, Corrupting])
def test_the_proof_finds_a_single_wrong_byte(layout: str, kind: type[MemoryStore]) -> None:
    """In every layout; a right store passes."""
    rank = Rank(Shape(layout, 2, 12, 4, 4, 16, 2), kind(), torch.device("cpu"), staging_bytes=1 << 16)
    try:
        if kind is MemoryStore:
            prove(rank, seed=1, count=8)
        else:
            with pytest.raises(WrongBytesError, match="other bytes"):
                prove(rank, seed=1, count=8)
    finally:
        rank.close()


@pytest.mark.parametrize("part", ["transfers", "memory", "lookups", "end to end"])
def test_nothing_is_written_when_anything_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    """Not even the figures of the parts that were right."""

    def wrong(*args: object, **kwargs: object) -> Any:
        raise WrongBytesError("a byte")

    one = Ratio(1.0, 1.0, 1.0)
    monkeypatch.setattr(transfers, "run", lambda **_: [])
    monkeypatch.setattr(costs, "memory", lambda: costs.Memory(1, 4, {}, 1))
    monkeypatch.setattr(costs, "lookups", list)
    monkeypatch.setattr(endtoend, "run", lambda rounds: endtoend.EndToEnd(1.0, 1.0, 1.0, one, one))
    match part:
        case "transfers":
            monkeypatch.setattr(transfers, "run", wrong)
        case "memory" | "lookups":
            monkeypatch.setattr(costs, part, wrong)
        case _:
            monkeypatch.setattr(endtoend, "run", wrong)
    monkeypatch.setattr("sys.argv", ["run.py", "--out", str(tmp_path)])
    assert run.main() == 1
    assert "no figures, because something was wrong: a byte" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mooncake
def test_one_combination_is_measured_against_a_real_store() -> None:
    """Proved, compared with both competitors, and for saves and loads alike."""
    cases = transfers.run(layouts=["LBNHC"], tokens=[16], widths=[1], rounds=1)
    assert [case.operation for case in cases] == ["save", "load"]
    for case in cases:
        assert not case.direct
        assert case.layer_bytes == 16 * 512
        assert case.vllm_to_ours is not None
        # Thousands of tiny segments: the aim is 30, a busy machine must not fail this.
        assert case.vllm_to_ours.median > 5
