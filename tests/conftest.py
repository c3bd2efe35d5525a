"""Settings of the whole suite: Hypothesis profiles, and memory that shows what nobody wrote.

Warnings are errors, see ``pyproject.toml``. ``HYPOTHESIS_PROFILE=thorough`` looks ten times
longer for counter-examples.
"""

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from poison import Buffer, buffer

_CALM = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", max_examples=60, deadline=None, suppress_health_check=_CALM)
settings.register_profile("thorough", max_examples=600, deadline=None, suppress_health_check=_CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture
def poisoned() -> Iterator[Callable[[int], tuple[Buffer, int]]]:
    """Make buffers full of ``poison.POISON``; each comes with its address and lives as long as the test."""
    alive: list[Buffer] = []

    def make(size: int) -> tuple[Buffer, int]:
        made, address = buffer(size)
        alive.append(made)
        return made, address

    yield make
    alive.clear()
