"""A model's `config.json` from a path or standard input."""

from __future__ import annotations

import json
import pathlib
import sys

import typer

from kvshare_layout.errors import LayoutError
from kvshare_operator.core.pool.model_config import ModelConfig, read_model_config


def read_model_file(path: str) -> ModelConfig:
    """Read a model's file (`-` is standard input). Raises typer.BadParameter with every mistake in it."""
    try:
        text = sys.stdin.read() if path == "-" else pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise typer.BadParameter(f"{path} cannot be read: {reason}", param_hint="--model-config") from error
    try:
        return read_model_config(json.loads(text))
    except (ValueError, RecursionError) as error:
        mistakes = "; ".join(error.mistakes) if isinstance(error, LayoutError) else "it is not JSON"
        raise typer.BadParameter(f"{path}: {mistakes}", param_hint="--model-config") from error
