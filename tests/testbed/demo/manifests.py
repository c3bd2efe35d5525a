"""Manifests from the YAML templates beside this file; `${name}` is replaced by JSON, which is YAML too."""

import json
import string
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "manifests"


def render(template: str, **values: object) -> list[dict[str, Any]]:
    """The objects of one template.

    Args:
        template: file name without `.yaml`.
        values: what to put in; texts as they are, everything else as JSON.

    Raises:
        KeyError: if the template asks for a value that is not given.
    """
    written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    text = string.Template(_protect((FOLDER / f"{template}.yaml").read_text())).substitute(written)
    return [thing for thing in yaml.safe_load_all(text) if thing]


def _protect(text: str) -> str:
    """Keep Kubernetes' own `$(VAR)` as it is."""
    return text.replace("$(", "$$(")
