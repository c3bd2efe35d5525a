"""The connector against the interface of the installed vLLM: every call that vLLM makes is one that we take.

Runs with each supported version (`make test-versions`), so that a new or changed hook is looked at before anybody meets
it in production.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

#: Hooks that are left to vLLM's base class, and why its answer is right for us.
LEFT_TO_VLLM = {
    "role": "the base class keeps it",
    "bind_connector_metadata": "the base class keeps the step's metadata",
    "clear_connector_metadata": "the base class drops the step's metadata",
    "has_connector_metadata": "the base class knows",
    "supports_divergent_local_hybrid_hits": "models with several kinds of caches are not cached",
    "supports_sleep_mode": "an engine with sleep mode is disabled with a reason, it does not fail to start",
    "unregister_kv_caches": "with sleep mode nothing is registered",
    "restore_kv_caches": "with sleep mode nothing is registered",
    "get_mem_pool_context": "caches may lie in any memory",
    "set_host_xfer_buffer_ops": "the packed executor has a buffer of its own",
    "finish_forward": "saves are ordered behind the step by an event",
    "reset_capture_state": "nothing of ours is captured in a graph",
    "handle_preemptions": "blocks that are being saved are pinned",
    "get_kv_connector_kv_cache_events": "events are made in the scheduler process, see take_events",
    "bind_kv_cache_manager": "the base class passes the block pool on to bind_gpu_block_pool",
    "get_loaded_kv_cache_group_ids": "there is one group, and it is loaded",
    "get_external_cache_hit_sources": "a label of metrics only",
    "register_finished_partial_tail": "only complete blocks are saved",
    "has_pending_block_frees": "pins are released in update_connector_output",
    "requires_piecewise_for_cudagraph": "no layer waits for a load",
    "get_finished_count": "every rank reports",
}  # fmt: skip


@pytest.fixture(scope="module")
def connector(played: ModuleType) -> Any:
    """Our class; ``played`` imports vLLM quietly."""
    assert played
    from kvshare_connector.connector import KVShareConnector

    return KVShareConnector


def interface(connector: type) -> dict[str, Callable[..., Any]]:
    """Public hooks of vLLM's own classes above ours, by name, the nearest first."""
    found: dict[str, Callable[..., Any]] = {}
    for base in connector.__mro__[1:]:
        if not base.__module__.startswith("vllm."):
            continue
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function) and not name.startswith("_"):
                found.setdefault(name, function)
    return found


def own(connector: type, name: str) -> Callable[..., Any]:
    """Our version of a hook, out of its decorators."""
    member = vars(connector)[name]
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    unwrapped: Callable[..., Any] = inspect.unwrap(function)  # type: ignore[arg-type]
    return unwrapped


def test_nothing_that_vllm_demands_is_missing(connector: Any) -> None:
    """No abstract method is left."""
    assert connector.__abstractmethods__ == frozenset()


def test_every_hook_of_this_vllm_is_ours_or_left_to_it_for_a_reason(connector: Any) -> None:
    """A hook that nobody has looked at may be a duty that we do not fulfil."""
    unknown = set(interface(connector)) - set(vars(connector)) - set(LEFT_TO_VLLM)
    assert not unknown, f"hooks of this vLLM that nobody has looked at: {sorted(unknown)}"


def test_no_hook_is_both_ours_and_left_to_vllm(connector: Any) -> None:
    """The list above is true."""
    assert not set(LEFT_TO_VLLM) & set(vars(connector))


def test_our_hooks_take_what_vllm_gives(connector: Any) -> None:
    """Same parameters by name and order, all of vLLM's accepted, none demanded that it does not give."""
    wrong = []
    for name, function in interface(connector).items():
        if name not in vars(connector):
            continue
        theirs = inspect.signature(function).parameters.values()
        ours = inspect.signature(own(connector, name)).parameters.values()
        takes_more = any(p.kind == p.VAR_KEYWORD for p in ours)
        given = [p.name for p in theirs if p.kind != p.VAR_KEYWORD]
        names = [p.name for p in ours if p.kind != p.VAR_KEYWORD]
        if names[: len(given)] != given and not (takes_more and given[: len(names)] == names):
            wrong.append(f"{name}: vLLM gives {given}, we take {names}")
        if demanded := [p.name for p in ours if p.default is p.empty and p.name in names[len(given) :]]:
            wrong.append(f"{name}: {demanded} is demanded and never given")
        if any(p.kind == p.VAR_KEYWORD for p in theirs) and not takes_more:
            wrong.append(f"{name}: vLLM may give more by name")
    assert wrong == []
