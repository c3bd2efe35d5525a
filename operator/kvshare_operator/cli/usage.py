"""What all commands have in common for the person who types: examples behind the help text.

Why this exists: every `--help` ends with examples in the same form, written once beside the command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Command = TypeVar("Command", bound=Callable[..., Any])


def with_examples(examples: str) -> Callable[[Command], Command]:
    """Return a decorator that puts ``examples`` (several lines) behind a command's own help text."""

    def decorate(command: Command) -> Command:
        command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n{examples}"
        return command

    return decorate
