"""Facts of indexers: from vLLM's own cache class to an encoding that is known, or to the reason why it is not."""

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvshare_connector.worker.facts import cache_of, gather
from kvshare_connector.worker.indexers import indexer_encoding
from kvshare_connector.worker.setting import Setting
from physical import caches

CUDA = Setting("cuda", "fp8")
TOKENS, BLOCKS = 64, 3


@pytest.fixture(scope="module")
def vllm_classes(played: ModuleType) -> SimpleNamespace:
    """vLLM's classes for indexers."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backends.mla import indexer

    import played_indexers

    assert played
    if not hasattr(played_indexers.indexer_cache(TOKENS), "uses_shuffled_layout"):
        pytest.skip("this vLLM does not say how its kernels lay out the keys")
    return SimpleNamespace(cache=played_indexers.indexer_cache, interface=interface, backends=indexer)


def _view(tokens: int = TOKENS, **more: int) -> torch.Tensor:
    return caches("BLHNC", 1, BLOCKS, 1, tokens, 132, **more)[1][0]


def _encoding(classes: Any, **given: Any) -> tuple[str, bool]:
    layer = classes.cache(TOKENS)
    facts = {
        "spec": layer.get_kv_cache_spec(None), "backend": layer.get_attn_backend(), "layer": layer, "view": _view(),
        "setting": CUDA, **given,
    }  # fmt: skip
    return indexer_encoding(**facts)


def test_vllms_own_indexer_is_known(vllm_classes: Any) -> None:
    """The page of the kernels is part of what it is; a block may have several."""
    assert _encoding(vllm_classes) == ("indexer-pages:fp8:132:64", True)
    assert _encoding(vllm_classes, view=_view(pad=4096)) == ("indexer-pages:fp8:132:64", True)
    pages = _view(32).view(1, BLOCKS, 32, 132).transpose(0, 1)[:, :, None]
    assert _encoding(vllm_classes, view=pages) == ("indexer-pages:fp8:132:32", True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_size", 68), ("dtype", torch.float8_e4m3fn), ("max_tp_shards", None), ("max_tp_shards", 2),
        ("num_kv_heads", 2), ("tokens_per_state", 4), ("num_head_slots", 2), ("state_content_bytes", 132),
        ("cache_dtype_str", "fp8_ds_mla"), ("model_version", "deepseek_v4"), ("kv_quant_mode", 1),
    ],
)  # fmt: skip
def test_another_specification_is_not_known(vllm_classes: Any, field: str, value: Any) -> None:
    """The field is named with what it says and what it would have to say."""
    spec = vllm_classes.cache(TOKENS).get_kv_cache_spec(None)
    changed = dataclasses.replace(spec, **{field: value})
    encoding, sliceable = _encoding(vllm_classes, spec=changed)
    assert encoding.startswith(f"unknown:{field} ")
    assert not sliceable


def test_other_classes_and_platforms_are_not_known(vllm_classes: Any) -> None:
    """Names that are inherited prove nothing, and other platforms put the same bytes in another order."""
    layer = vllm_classes.cache(TOKENS)
    shuffled = type("DeepseekV32IndexerCache", (), {"uses_shuffled_layout": True})()
    pooled = type("Glm5NextIndexerBackend", (vllm_classes.backends.DeepseekV32IndexerBackend,), {})
    spec = layer.get_kv_cache_spec(None)
    other = vllm_classes.interface.HiddenStateCacheSpec(
        **{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    )
    rows: list[tuple[str, dict[str, Any]]] = [
        ("platform  given", {"setting": Setting()}),
        ("platform cpu given", {"setting": Setting("cpu", "fp8")}),
        ("type of keys mxfp4 given", {"setting": Setting("cuda", "mxfp4")}),
        ("uses_shuffled_layout True", {"layer": shuffled}),
        ("uses_shuffled_layout None", {"layer": SimpleNamespace()}),
        ("cache class SimpleNamespace", {"layer": SimpleNamespace()}),
        ("backend class Glm5NextIndexerBackend", {"backend": pooled}),
        ("backend None", {"backend": None}),
        ("specification HiddenStateCacheSpec", {"spec": other}),
        ("bytes from token to token 264", {"view": _view(128)[:, :, ::2]}),
        ("bytes of a token 68", {"view": _view()[..., :68]}),
    ]  # fmt: skip
    for said, given in rows:
        encoding, sliceable = _encoding(vllm_classes, **given)
        assert encoding.startswith("unknown:")
        assert said in encoding
        assert not sliceable


def test_the_role_of_a_cache_is_in_its_specification(vllm_classes: Any) -> None:
    """A latent and an indexer have one class."""
    spec = vllm_classes.cache(TOKENS).get_kv_cache_spec(None)
    assert cache_of(spec) == "indexer"
    assert cache_of(dataclasses.replace(spec, cache_role=vllm_classes.interface.SparseCacheRole.SPARSE)) == ""
    assert cache_of(SimpleNamespace()) == ""


def test_two_caches_of_a_layer_are_two_records(vllm_classes: Any) -> None:
    """In the order of layers, the attention's own first; two indexers of one layer are a contradiction."""
    layer = vllm_classes.cache(TOKENS)
    spec = layer.get_kv_cache_spec(None)
    latent = dataclasses.replace(spec, head_size=576, cache_role=vllm_classes.interface.SparseCacheRole.SPARSE)
    names = {f"model.layers.{n}.self_attn.{part}": n for n in (1, 0) for part in ("indexer.k_cache", "attn")}
    specs = {name: spec if "indexer" in name else latent for name in names}
    whole = vllm_classes.interface.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    config = SimpleNamespace(
        num_blocks=BLOCKS, kv_cache_groups=[vllm_classes.interface.KVCacheGroupSpec(list(names), whole)]
    )
    tensors = {
        name: _view() if "indexer" in name else caches("LBHNC", 1, BLOCKS, 1, TOKENS, 576)[1][0] for name in names
    }
    layers = {name: layer if "indexer" in name else SimpleNamespace(get_attn_backend=lambda: None) for name in names}
    facts, views = gather(tensors, config, layers, rank=0, tp_rank=0, pp_rank=0, setting=CUDA)
    assert facts.problems == ()
    assert [(x.index, x.cache, x.encoding) for x in facts.layers] == [
        (0, "", "mla-latent:uint8:576+0"), (0, "indexer", "indexer-pages:fp8:132:64"),
        (1, "", "mla-latent:uint8:576+0"), (1, "indexer", "indexer-pages:fp8:132:64"),
    ]  # fmt: skip
    assert [view.cache.shape[-1] for view in views] == [576, 132, 576, 132]
    again = {**tensors, "other.layers.1.indexer": _view()}
    specs["other.layers.1.indexer"] = spec
    config.kv_cache_groups[0].layer_names.append("other.layers.1.indexer")
    facts, _ = gather(again, config, layers, rank=0, tp_rank=0, pp_rank=0, setting=CUDA)
    assert "several caches belong to one layer" in facts.problems[0]
