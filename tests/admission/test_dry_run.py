"""The chart's own test: what a dry run must bring back, and what is said when it does not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvshare_operator.api import names
from kvshare_operator.core import review
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.dry_run import POOL, dry_run, trial_pod
from pods import SETTINGS, Json


class Answering:
    """An API server that answers a dry run with these annotations, or refuses it."""

    def __init__(self, annotations: Json | None = None, error: ApiError | None = None) -> None:
        self.annotations, self.error = annotations, error
        self.asked: list[tuple[str, str, Any]] = []

    async def call(self, method: str, path: str, *, query: Any = None, body: Any = None, **_: Any) -> Json:
        """Answer."""
        self.asked.append((method, path, query))
        if self.error is not None:
            raise self.error
        return {**body, "metadata": {**body["metadata"], "annotations": self.annotations or {}}}


def run(api: Answering) -> tuple[bool, str]:
    """One dry run in namespace `team`."""
    return asyncio.run(dry_run(api, "team"))


def test_webhooks_real_answer_passes_and_nothing_is_stored() -> None:
    """The record that a review of the trial pod gives."""
    pod = trial_pod()
    request = {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "team", "operation": "CREATE", "object": pod}
    answered = review.answer(request, None, SETTINGS)
    assert answered.reason == "PoolNotFound"
    api = Answering({names.POOL: POOL, names.INJECTED: json.dumps({"reason": answered.reason})})
    good, sentence = run(api)
    assert good, sentence
    assert api.asked == [("POST", "/api/v1/namespaces/team/pods", {"dryRun": "All"})]


@pytest.mark.parametrize(
    ("api", "words"),
    [
        (Answering(), "did not reach the webhook"),
        (Answering({names.INJECTED: "no json"}), "PoolNotFound expected"),
        (Answering({names.INJECTED: '{"pool": "p1"}'}), "PoolNotFound expected"),
        (Answering(error=ApiError(403, "pods is forbidden")), "pods is forbidden"),
    ],
    ids=["not asked", "nonsense", "another record", "forbidden"],
)
def test_everything_else_fails_with_what_was_seen(api: Answering, words: str) -> None:
    """And where to look."""
    good, sentence = run(api)
    assert not good
    assert words in sentence
