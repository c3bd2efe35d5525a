"""Settings of the whole suite: Hypothesis profiles, memory that shows what nobody wrote, an end that leaves nothing.

Warnings are errors, see ``pyproject.toml``. The default profile tries the same cases each time, so that a run says
something about the change and not about the draw; ``HYPOTHESIS_PROFILE=thorough`` (``make test-properties``) draws new
ones, ten times as many.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from poison import Buffer, buffer
from testbed.fair_cores import no_session_groups

_CALM = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", max_examples=60, deadline=None, suppress_health_check=_CALM, derandomize=True)
settings.register_profile("thorough", max_examples=600, deadline=None, suppress_health_check=_CALM, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


_while_running = ExitStack()


def pytest_configure() -> None:
    """A run that is terminated ends as with Ctrl-C: fixtures stop their engines, which would outlive it otherwise."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _while_running.enter_context(no_session_groups())


def pytest_unconfigure() -> None:
    """What was changed on the machine is as it was."""
    _while_running.close()


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
