"""Rounds: competitors measured in turn, so that a busy machine slows all of them alike.

Pure arithmetic and a clock. What counts is the ratio within a round; its median over the rounds, and its spread.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """A ratio over all rounds.

    Attributes:
        median: of the rounds.
        least: smallest of a round.
        most: largest of a round.
    """

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.least)} to {_short(self.most)})"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The ratio of two competitors, round by round.

    Raises:
        ValueError: no rounds, or not as many of both.
    """
    each = [a / b for a, b in zip(numerators, denominators, strict=True)]
    if not each:
        raise ValueError("no rounds given, at least one expected")
    return Ratio(statistics.median(each), min(each), max(each))


def seconds(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(competitors: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure all competitors in every round, the order reversed from one round to the next.

    Args:
        competitors: each does its work once and returns its seconds.
        rounds: rounds that count; one more comes first and does not.
    """
    found: dict[str, list[float]] = {name: [] for name in competitors}
    for number in range(rounds + 1):
        order = list(competitors) if number % 2 else list(reversed(list(competitors)))
        for name in order:
            taken = competitors[name]()
            if number:
                found[name].append(taken)
    return found
