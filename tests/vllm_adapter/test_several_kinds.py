"""Several kinds: models with caches of no common form are not cached, on whichever side it shows, and serve."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvshare_layout import RankFacts

if TYPE_CHECKING:
    from played_engine import Engine, World

BLOCKS, TOKENS = 8, 4
PROMPT = list(range(5, 30))


def layer(number: int) -> str:
    """vLLM's name of a layer."""
    return f"model.layers.{number}.self_attn.attn"


def attention(interface: Any, *, heads: int = 4, window: int | None = None, size: int = 8) -> Any:
    """A specification of a full or a windowed layer."""
    kind = interface.FullAttentionSpec if window is None else interface.SlidingWindowSpec
    more = {} if window is None else {"sliding_window": window}
    return kind(block_size=TOKENS, num_kv_heads=heads, head_size=size, dtype=torch.float16, **more)


def state(interface: Any) -> Any:
    """A specification of a recurrent layer."""
    return interface.MambaSpec(block_size=TOKENS, shapes=((4, 4),), dtypes=(torch.float16,))


def cache(spec: Any) -> Any:
    """What the engine registers for a layer: one tensor, or a list of states."""
    if not hasattr(spec, "num_kv_heads"):
        return [torch.zeros(BLOCKS, 4, 4)]
    return torch.zeros(BLOCKS, spec.num_kv_heads, TOKENS, 2 * spec.head_size, dtype=torch.float16)


class Sides:
    """The connector's two classes for an engine with these groups of layers: ``(specification, layer numbers)``."""

    def __init__(self, world: "World", groups: Sequence[tuple[Any, Sequence[int]]], extra: Any = None) -> None:
        import copy

        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        from kvshare_connector.connector import KVShareConnector
        from played_model import Backend

        config = copy.copy(world.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = 0
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_connector_extra_config = {"master_server_address": "memory:1", **(extra or {})}
        specs = {layer(n): spec for spec, numbers in groups for n in numbers}
        config.compilation_config = SimpleNamespace(
            static_forward_context={name: SimpleNamespace(get_attn_backend=lambda: Backend) for name in specs}
        )
        kinds = [KVCacheGroupSpec([layer(n) for n in numbers], spec) for spec, numbers in groups]
        caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=kinds)
        self.rank = KVShareConnector(config, KVConnectorRole.WORKER, caches)
        self.scheduler = KVShareConnector(config, KVConnectorRole.SCHEDULER, caches)
        self.rank.register_kv_caches({name: cache(spec) for name, spec in specs.items()})
        facts = self.rank._worker_side._facts
        assert isinstance(facts, RankFacts)
        self.facts = facts
        self.scheduler._scheduler_side.take_facts([facts])

    @property
    def verdict(self) -> Any:
        """What the scheduler decided."""
        decision = self.scheduler._scheduler_side.decision
        assert decision is not None
        return decision.verdict

    def close(self) -> None:
        """End all threads."""
        self.rank.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def interface(played: Any) -> Any:
    """vLLM's specifications."""
    assert played
    from vllm.v1 import kv_cache_interface

    return kv_cache_interface


@pytest.fixture
def no_store(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations of stores that were opened: an engine that is not cached transfers nothing."""
    from kvshare_connector.store import mooncake
    from kvshare_connector.store.memory import MemoryStore

    used: list[str] = []

    def opened(*_: object) -> MemoryStore:
        client = MemoryStore()
        for operation in ("put", "get", "exists"):
            client.faults.before(operation, lambda name, _: used.append(name))
        return client

    monkeypatch.setattr(mooncake.MooncakeStore, "open", opened)
    return used


def test_attention_with_states_is_not_cached(world: "World", interface: Any, no_store: list[str]) -> None:
    """B14: whether replicas hold equal bytes is a question for each kind; a state is never taken for replicated."""
    sides = Sides(world, [(attention(interface, heads=1), [0, 2]), (state(interface), [1, 3])])
    assert (sides.verdict.state, sides.verdict.reason) == ("disabled", "SeveralKinds")
    assert "state" in sides.verdict.message
    assert {item.retention.rule for item in sides.facts.layers} == {"full", "state"}
    sides.close()
    assert no_store == []


def test_a_small_extra_cache_in_a_layer_group_is_not_overlooked(
    world: "World", interface: Any, no_store: list[str]
) -> None:
    """B13: sparse attention's indexer: one group for the engine, two geometries for whoever looks at every layer."""
    main, indexer = attention(interface), attention(interface, heads=1, size=2)
    whole = interface.UniformTypeKVCacheSpecs(
        block_size=TOKENS, kv_cache_specs={layer(0): main, layer(1): main, layer(2): indexer}
    )
    assert whole.kv_cache_specs[layer(2)] is indexer
    sides = Sides(world, [(main, [0, 1]), (indexer, [2])])
    assert (sides.verdict.state, sides.verdict.reason) == ("disabled", "SeveralKinds")
    assert "2 cache geometries" in sides.verdict.message
    sides.close()
    assert no_store == []


def test_two_groups_are_served_and_never_reported_by_block(world: "World", interface: Any, no_store: list[str]) -> None:
    """D2: block ids mean nothing with several groups, and reporting one would raise in the engine: none ever is.

    Every call that the engine makes for a request is answered, so it computes as without us.
    """
    sides = Sides(world, [(attention(interface), [0, 1]), (state(interface), [2, 3])])
    assert (sides.verdict.state, sides.verdict.reason) == ("disabled", "SeveralKinds")
    request = SimpleNamespace(
        request_id="r", num_tokens=len(PROMPT), num_prompt_tokens=len(PROMPT), num_computed_tokens=24,
        block_hashes=[b"h%d" % n for n in range(6)], lora_request=None, mm_features=[], num_preemptions=0,
        all_token_ids=PROMPT, is_finished=lambda: True,
    )  # fmt: skip
    scheduler, rank = sides.scheduler, sides.rank
    scheduler.bind_gpu_block_pool(SimpleNamespace(num_gpu_blocks=BLOCKS, blocks=[]))
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2], [3])), 0)
    output = SimpleNamespace(
        preempted_req_ids=set(), num_scheduled_tokens={"r": 24}, kv_connector_block_state=None,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
        scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=0)],
    )  # fmt: skip
    metadata = scheduler.build_connector_meta(output)
    rank.bind_connector_metadata(metadata)
    rank.start_load_kv(None)
    rank.wait_for_save()
    results = rank.get_transfer_results(set())
    assert (results.finished_recving or set(), rank.get_block_ids_with_load_errors()) == (set(), set())
    assert scheduler.request_finished_all_groups(request, ([1, 2], [3])) == (False, None)
    assert scheduler.build_connector_meta(output).step.saves == ()
    assert scheduler.reset_cache() is True
    sides.close()
    assert no_store == []


@pytest.mark.parametrize("window", [None, 8])
def test_attention_of_the_same_parts_is_cached(
    world: "World", interface: Any, no_store: list[str], window: int | None
) -> None:
    """What the others lack is only a common form; a window has one."""
    sides = Sides(
        world, [(attention(interface), [0, 1]), (attention(interface, window=window), [2, 3])][: 1 + bool(window)]
    )
    assert sides.verdict.state == "shared"
    assert isinstance(no_store, list)
    sides.close()


def test_windows_that_keep_more_than_their_window_are_not_cached(
    world: "World", interface: Any, no_store: list[str]
) -> None:
    """The engine computes some of their tokens again, by a rule of its own; so do windows of compressed latents."""
    from dataclasses import replace

    window = replace(attention(interface, window=8), extra_retained_tokens=2)
    sides = Sides(world, [(attention(interface), [0, 1]), (window, [2, 3])])
    assert (sides.verdict.state, sides.verdict.reason) == ("disabled", "SeveralKinds")
    assert "other" in sides.verdict.message
    sides.close()
    assert no_store == []


def test_hashes_finer_than_blocks_are_not_cached(world: "World", interface: Any, no_store: list[str]) -> None:
    """Several groups may be hashed in smaller units, and then a hash is not the name of a block."""
    import copy

    world.config = copy.copy(world.config)
    world.config.cache_config = copy.copy(world.config.cache_config)
    world.config.cache_config.prefix_match_unit = TOKENS // 2
    sides = Sides(world, [(attention(interface), [0, 1]), (attention(interface, window=8), [2, 3])])
    assert (sides.verdict.state, sides.verdict.reason) == ("disabled", "BlockMismatch")
    sides.close()
    assert no_store == []


def test_played_engines_are_of_one_kind(world: "World", engines: "Callable[..., Engine]") -> None:
    """B14: the other tests of lives say something about one kind only."""
    assert len(engines(world, "a").side.decision.kinds) == 1
