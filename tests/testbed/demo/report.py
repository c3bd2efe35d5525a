"""What the demo found out: rows, whether each is right, and the JSON file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One request to one engine.

    Attributes:
        step: what was asked.
        engine: name of the engine's Deployment.
        tp: its tensor-parallel size.
        layout: its physical cache layout.
        cached_tokens: prompt tokens that it did not compute.
        prompt_tokens: length of the prompt.
        tokens_match: whether it generated what the reference of the same size generated.
        failed_keys: keys whose transfer failed during the step.
        expected_cached: what `cached_tokens` must be.
    """

    step: str
    engine: str
    tp: int
    layout: str
    cached_tokens: int
    prompt_tokens: int
    tokens_match: bool
    failed_keys: int
    expected_cached: int

    @property
    def right(self) -> bool:
        """Whether everything in the row is as it must be."""
        return self.cached_tokens == self.expected_cached and self.tokens_match and self.failed_keys == 0


@dataclass
class Report:
    """Everything that the demo reports.

    Attributes:
        rows: one for each request.
        pool: the KVSharePool at the end.
        refusal: what the API server answered to the pod that must be refused; empty when it was accepted.
        seconds: how long each part took.
        problems: what else is not as it must be, as sentences.
    """

    rows: list[Row] = field(default_factory=list)
    pool: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether all rows are right and nothing else is wrong."""
        return bool(self.rows) and all(row.right for row in self.rows) and not self.problems

    def to_json(self) -> dict[str, Any]:
        """The published form."""
        keys = ["step", "engine", "tp", "layout", "cached_tokens", "prompt_tokens", "tokens_match", "failed_keys"]
        return {
            "rows": [{key: getattr(row, key) for key in keys} for row in self.rows],
            "pool": self.pool,
            "refusal": self.refusal,
            "seconds": {part: round(seconds, 1) for part, seconds in self.seconds.items()},
        }

    def write(self, file: Path) -> None:
        """Write the published form, replacing an older one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.to_json(), indent=2) + "\n")
