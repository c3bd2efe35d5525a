"""Processes that may not watch resources wait a little for the one that they need."""

from __future__ import annotations

import asyncio

from kvshare_operator.edges.memory_api import MemoryClusterApi
from kvshare_operator.edges.pool_index import wait_until_served


def test_resource_that_comes_a_moment_later_is_waited_for() -> None:
    """The group first, the resource behind it, as an API server publishes them."""

    async def run() -> bool:
        api = MemoryClusterApi()
        waiting = asyncio.create_task(wait_until_served(api, seconds=20))
        await asyncio.sleep(0.05)
        api.answers["/apis"] = {"groups": [{"name": "kvshare.dev"}]}
        await asyncio.sleep(0.25)
        assert not waiting.done()
        api.answers["/apis/kvshare.dev/v1alpha1"] = {"resources": [{"name": "kvsharepools"}]}
        return await waiting

    assert asyncio.run(run()) is True


def test_resource_that_never_comes_stops_nothing() -> None:
    """The process goes on, and says what that means."""
    assert asyncio.run(wait_until_served(MemoryClusterApi(), seconds=0.1)) is False
