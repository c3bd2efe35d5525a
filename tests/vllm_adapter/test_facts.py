"""Facts of a rank: from real tensors and vLLM's own specifications to plain values."""

import dataclasses
import itertools
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvshare_connector.worker.facts import (
    ENCODING_ATTRIBUTE,
    KV_PACKED,
    encoding_of,
    gather,
    layer_index,
    layout_name,
    retention_of,
)
from physical import LAYOUTS, caches


@pytest.fixture(scope="module")
def interface(played: ModuleType) -> ModuleType:
    """vLLM's cache interface."""
    from vllm.v1 import kv_cache_interface

    return kv_cache_interface  # type: ignore[no-any-return]


def _name_of(views: Sequence[torch.Tensor]) -> str:
    step = views[1].storage_offset() - views[0].storage_offset() if len(views) > 1 else None
    return layout_name(views[0].shape, views[0].stride(), step)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(3, 5, 4, 7), (3, 6, 6, 6), (2, 2, 2, 2), (4, 4, 4, 4)])
def test_the_layout_is_read_from_strides(layout: str, size: tuple[int, int, int, int]) -> None:
    """B9: B, N and H may all be equal; shapes prove nothing, strides do."""
    layers, blocks, heads, tokens = size
    _, views = caches(layout, layers, blocks, heads, tokens, 8)
    assert _name_of(views) == layout
    _, padded = caches(layout, layers, blocks, heads, tokens, 8, pad=24)
    assert _name_of(padded) == layout


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC"])
def test_layers_in_allocations_of_their_own_have_a_layout_too(layout: str) -> None:
    """Then L is outermost."""
    _, views = caches(layout, 1, 5, 4, 7, 8)
    assert _name_of(views) == layout


def test_an_order_without_a_name_is_called_other() -> None:
    """N outermost: nobody does that, and nobody guesses."""
    cache = torch.empty(7, 5, 4, 8).permute(1, 2, 0, 3)
    assert layout_name(cache.shape, cache.stride(), None) == "other"


def _spec(interface: ModuleType, cls: str = "FullAttentionSpec", **values: Any) -> Any:
    base = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return getattr(interface, cls)(**{**base, **values})


def _backend(name: str, **attributes: object) -> Any:
    return SimpleNamespace(get_name=lambda: name, **attributes)


@pytest.mark.parametrize("name", sorted(KV_PACKED))
def test_common_backends_share_one_encoding(interface: ModuleType, name: str) -> None:
    """Whichever of them wrote, the others read."""
    assert encoding_of(_spec(interface), _backend(name), None) == ("kv-packed:bfloat16:64+64", True)


def test_types_and_head_sizes_are_part_of_the_encoding(interface: ModuleType) -> None:
    """A4: equal byte counts prove nothing."""
    specs = [
        _spec(interface), _spec(interface, dtype=torch.float16), _spec(interface, head_size=32, head_size_v=96),
        _spec(interface, head_size=128), _spec(interface, dtype=torch.float8_e4m3fn),
        _spec(interface, dtype=torch.float8_e5m2),
    ]  # fmt: skip
    assert len({encoding_of(spec, _backend("FLASH_ATTN"), None)[0] for spec in specs}) == len(specs)


def test_cpu_kernels_differ_by_instruction_set(interface: ModuleType) -> None:
    """B8: the same backend packs K by what the processor has."""
    ids = [encoding_of(_spec(interface), _backend("CPU_ATTN"), SimpleNamespace(isa=isa)) for isa in ("vec", "amx")]
    assert [sliceable for _, sliceable in ids] == [True, True]
    assert len({name for name, _ in ids}) == 2
    assert encoding_of(_spec(interface), _backend("CPU_ATTN"), SimpleNamespace()) == (
        "unknown:CPU_ATTN:bfloat16:64+64", False,
    )  # fmt: skip


def test_what_mixes_heads_is_not_sliceable(interface: ModuleType) -> None:
    """B6: K and V planes, opaque slots, compressed tokens, backends that nobody has declared."""
    rows = [
        (_spec(interface, num_head_slots=4), "FLASHINFER", "slots4"),
        (_spec(interface, num_head_slots=2), "ROCM_ATTN", "slots2"),
        (_spec(interface, state_content_bytes=100), "TURBOQUANT", "opaque"),
        (_spec(interface, tokens_per_state=4), "FLASH_ATTN", "compressed"),
        (_spec(interface), "NEW_ATTN", "unknown:NEW_ATTN"),
        (_spec(interface), "B12X", "unknown:B12X"),
    ]
    for spec, name, start in rows:
        encoding, sliceable = encoding_of(spec, _backend(name), None)
        assert encoding.startswith(start)
        assert not sliceable


def test_scaled_caches_and_declared_ones_share_under_their_own_ids(interface: ModuleType) -> None:
    """Inline scales belong to their head and token; an outside backend says what its cells hold."""
    modes = interface.KVQuantMode
    scaled = next(mode for mode in modes if mode.is_per_token_head)
    spec = _spec(interface, dtype=torch.uint8, state_content_bytes=136, kv_quant_mode=scaled)
    encoding, sliceable = encoding_of(spec, _backend("TRITON_ATTN"), None)
    assert encoding.startswith("kv-packed-scaled:")
    assert sliceable
    declared = _backend("MINE", **{ENCODING_ATTRIBUTE: "kv-packed"})
    assert encoding_of(_spec(interface), declared, None) == ("kv-packed:bfloat16:64+64", True)


def test_mla_is_one_latent_head(interface: ModuleType) -> None:
    """Its own id, whatever backend reads it."""
    spec = _spec(interface, "MLAAttentionSpec", num_kv_heads=1, head_size=576)
    assert encoding_of(spec, _backend("FLASHMLA"), None) == ("mla-latent:bfloat16:576+0", True)


@pytest.mark.parametrize(
    ("cls", "values", "rule"),
    [
        ("FullAttentionSpec", {}, "full"),
        ("FullAttentionSpec", {"sliding_window": 128}, "full"),
        ("MLAAttentionSpec", {"num_kv_heads": 1}, "full"),
        ("SlidingWindowSpec", {"sliding_window": 128}, "window"),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 64}, "other"),
        ("SinkFullAttentionSpec", {"sink_len": 4}, "other"),
    ],
)
def test_retention_by_vllms_own_classes(interface: ModuleType, cls: str, values: dict[str, Any], rule: str) -> None:
    """Sinks and chunks are not plain full attention."""
    assert retention_of(_spec(interface, cls, **values)).rule == rule


def test_a_class_made_of_a_window_has_another_rule(interface: ModuleType) -> None:
    """vLLM 0.30 and 0.31 have one: a scratch cache of one block that is written round and round."""
    made = dataclasses.make_dataclass("KpoolTailSpec", [], bases=(interface.SlidingWindowSpec,), frozen=True)
    for cls, rule in ((interface.SlidingWindowSpec, "window"), (made, "other")):
        spec = cls(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16, sliding_window=128)
        assert retention_of(spec).rule == rule


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.7.self_attn.attn", 7),
        ("transformer.h.11.attn", 11),
        ("language_model.model.layers.3.self_attn.attn", 3),
        ("model.decoder.layers.0.self_attn", 0),
        ("encoder.12.attn", 12),
        ("model.attn", None),
    ],
)
def test_the_layers_number_is_in_its_name(name: str, index: int | None) -> None:
    """As the engine's models name them."""
    assert layer_index(name) == index


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.7.self_attn.attn", 7),
        ("model.layers.61.mtp_block.self_attn.attn", 61),
        ("mtp.layers.1.self_attn.attn", 33),
        ("draft_model.model.layers.0.self_attn.attn", 32),
        ("draft_model.model.layers.31.self_attn.attn", 63),
        ("language_model.mtp.layers.0.self_attn.attn", 0),  # not known: meets the model's own, and nothing is cached
    ],
)
def test_layers_of_a_draft_count_on_behind_the_model(name: str, index: int) -> None:
    """Whether their names do so or begin at 0 again."""
    assert layer_index(name, 32) == index


def _gather(interface: ModuleType, layout: str, kv_caches: dict[str, Any], **layer: object) -> Any:
    names = list(kv_caches)
    config = SimpleNamespace(
        num_blocks=5,
        kv_cache_groups=[
            interface.KVCacheGroupSpec(names, _spec(interface, block_size=4, head_size=4, dtype=torch.uint8))
        ],
    )
    layers = {n: SimpleNamespace(get_attn_backend=lambda: _backend("FLASH_ATTN"), **layer) for n in names}
    return gather(kv_caches, config, layers, rank=3, tp_rank=1, pp_rank=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_permuted_storage_are_understood(interface: ModuleType, layout: str) -> None:
    """B9, B15: the tensors say where the bytes are, the configuration is not asked."""
    _, views = caches(layout, 2, 5, 2, 4, 8)
    facts, byte_views = _gather(interface, layout, {f"model.layers.{i + 6}.attn": v for i, v in enumerate(views)})
    assert facts.problems == ()
    assert [(x.index, x.layout, x.heads, x.cell_bytes, x.block_tokens) for x in facts.layers] == [
        (6, layout, 2, 8, 4), (7, layout, 2, 8, 4),
    ]  # fmt: skip
    assert all(torch.equal(mine.cache, view) for mine, view in zip(byte_views, views, strict=True))
    assert all(mine.cache.data_ptr() == view.data_ptr() for mine, view in zip(byte_views, views, strict=True))


def test_what_is_not_understood_is_a_problem_with_a_reason(interface: ModuleType) -> None:
    """The engine is not cached; it is never stopped."""
    _, views = caches("LBHNC", 2, 5, 2, 4, 8)
    strange = {
        "model.attn": views[0],
        "model.layers.1.attn": views[1].unsqueeze(0),
    }
    facts, _ = _gather(interface, "LBHNC", strange)
    assert [problem.partition(":")[0] for problem in facts.problems] == ["LayerUnknown", "CacheShapeUnknown"]
    twice, _ = _gather(interface, "LBHNC", {"a.layers.1.attn": views[0], "b.layers.1.attn": views[1]})
    assert "several caches belong to one layer" in twice.problems[0]


def test_a_layer_that_reads_anothers_cache_is_not_counted(interface: ModuleType) -> None:
    """Cross-layer sharing: the bytes exist once."""
    _, views = caches("LBHNC", 1, 5, 2, 4, 8)
    shared = {"model.layers.0.attn": views[0], "model.layers.1.attn": views[0]}
    facts, _ = _gather(interface, "LBHNC", shared, kv_sharing_target_layer_name="model.layers.0.attn")
    assert facts.layers == ()


def test_facts_do_not_change_on_their_way(interface: ModuleType) -> None:
    """They travel as JSON."""
    _, views = caches("BLNHC", 2, 5, 2, 4, 8)
    facts, _ = _gather(interface, "BLNHC", {f"model.layers.{i}.attn": v for i, v in enumerate(views)})
    assert type(facts).from_json(facts.to_json()) == facts


def test_layout_names_are_in_a_fixed_order() -> None:
    """Where several names agree, because an axis has size 1, all ranks say the same."""
    names = {layout_name((5, 1, 4, 8), caches(layout, 1, 5, 1, 4, 8)[1][0].stride(), None) for layout in LAYOUTS}
    assert names == {"LBHNC"}
    assert len(list(itertools.pairwise(LAYOUTS))) == 5
