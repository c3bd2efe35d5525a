"""Facts of recurrent states: from vLLM's own specification and pages to an encoding, or to why there is none."""

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvshare_connector.scheduler import states
from kvshare_connector.scheduler.tables import KindGroups
from kvshare_connector.worker.facts import gather
from kvshare_connector.worker.setting import Setting
from kvshare_layout.facts import UNKNOWN
from kvshare_layout.kinds import FULL, Kind, Retention

BLOCKS, TOKENS = 3, 16
SETTING = Setting("cuda", "fp8", "kernels-a")
NAME = "model.layers.1.linear_attn"


@pytest.fixture(scope="module")
def interface(played: ModuleType) -> Any:
    """vLLM's specifications."""
    assert played
    from vllm.v1 import kv_cache_interface

    return kv_cache_interface


def spec_of(interface: Any, **changes: Any) -> Any:
    """A convolution in bfloat16 and a matrix in float32, in padded pages."""
    base = interface.MambaSpec(
        block_size=TOKENS, shapes=((3, 8), (4, 2)), dtypes=(torch.bfloat16, torch.float32), page_size_padded=128,
        mamba_cache_mode="align",
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def pages(interface: Any, spec: Any) -> torch.Tensor:
    """The pages of one layer, as vLLM views its memory."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    raw = torch.zeros(BLOCKS * 128, dtype=torch.int8)
    tensor = interface.KVCacheTensor(size=raw.numel(), layers=[NAME], layer_stride=raw.numel(), block_stride=128)
    (view,) = interface.create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBNHC, tensor)
    assert isinstance(view, torch.Tensor)
    return view


def gathered(interface: Any, spec: Any, cache: Any, setting: Setting | None = SETTING) -> Any:
    """Facts and view of one layer."""
    group = interface.KVCacheGroupSpec([NAME], spec)
    config = interface.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])
    layers = {NAME: SimpleNamespace(get_attn_backend=lambda: SimpleNamespace)}
    facts, views = gather({NAME: cache}, config, layers, rank=0, tp_rank=0, pp_rank=0, setting=setting)
    assert facts.problems == ()
    return facts, views[0]


def test_vllms_own_pages_are_known(interface: Any) -> None:
    """A page is what a block holds of a layer, without the padding; tokens are those of the block."""
    spec = spec_of(interface)
    facts, view = gathered(interface, spec, pages(interface, spec))
    (layer,) = facts.layers
    assert (layer.cache, layer.retention, layer.heads, layer.block_tokens) == ("state", Retention("state"), 1, TOKENS)
    assert layer.encoding == "state:mamba2:SimpleNamespace:SimpleNamespace:kernels-a:3x8:bfloat16+4x2:float32"
    assert layer.cell_bytes == 3 * 8 * 2 + 4 * 2 * 4 == view.cache.shape[-1]
    assert view.cache.shape == (BLOCKS, 1, 1, 80)
    assert view.cache.stride(0) == 128
    assert facts.layouts == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mamba_cache_mode": "all"}, "mamba_cache_mode all given, align expected"),
        ({"mamba_cache_mode": "none"}, "mamba_cache_mode none given, align expected"),
        ({"num_speculative_blocks": 2}, "num_speculative_blocks 2 given, 0 expected"),
        ({"tp_replicated": True}, "tp_replicated True given, False expected"),
        ({"num_heads": 2}, "num_heads 2 given, 1 expected"),
    ],
)
def test_another_specification_is_not_known(interface: Any, changes: dict[str, Any], said: str) -> None:
    """The field is named with what it says and what it would have to say."""
    facts, _ = gathered(interface, spec_of(interface, **changes), pages(interface, spec_of(interface)))
    assert facts.layers[0].encoding.startswith(UNKNOWN)
    assert said in facts.layers[0].encoding


def test_pages_of_another_size_or_nothing_but_tensors_are_not_known(interface: Any) -> None:
    """What the engine registers must be what its specification says; and a list of states is another version's."""
    spec = spec_of(interface)
    wrong = (
        pages(interface, spec)[..., :79],
        torch.zeros(BLOCKS, 2, 1, 40, dtype=torch.int8),
        [torch.zeros(BLOCKS, 3, 8), torch.zeros(BLOCKS, 4, 2)],
    )
    for cache in wrong:
        facts, _ = gathered(interface, spec, cache)
        assert facts.layers[0].encoding.startswith(UNKNOWN)
        assert "[1, 1, 80] expected" in facts.layers[0].encoding
        assert facts.layers[0].cache == "state"


def test_nothing_is_known_without_the_names_of_the_kernels(interface: Any) -> None:
    """Equal shapes may hold turned matrices."""
    spec = spec_of(interface)
    for setting in (None, Setting("cuda", "fp8")):
        facts, _ = gathered(interface, spec, pages(interface, spec), setting)
        assert "kernels nothing given, their names expected" in facts.layers[0].encoding


def test_what_chooses_kernels_is_in_their_digest(played: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device, version or setting is another form; another model or address is not."""
    import vllm

    from kvshare_connector import compat

    assert played
    config = SimpleNamespace(mamba_config="triton", additional_config={}, model_config="a model")
    first = compat.state_kernels(config)
    assert compat.state_kernels(SimpleNamespace(**{**vars(config), "model_config": "another"})) == first
    found = {first}
    found.add(compat.state_kernels(SimpleNamespace(**{**vars(config), "mamba_config": "flashinfer"})))
    found.add(compat.state_kernels(SimpleNamespace(**{**vars(config), "additional_config": {"gdn": "cutedsl"}})))
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS-of-this-test")
    found.add(compat.state_kernels(config))
    monkeypatch.setattr(vllm, "__version__", "0.32.9")
    found.add(compat.state_kernels(config))
    assert len(found) == 5


KINDS = KindGroups(
    (Kind("full", FULL, "e", 4, 8, 4, (0,)), Kind("state", Retention("state"), "s", 4, 80, 4, (1, 2), 2, "f")),
    ((1,), (0, 2)),
    lambda block: block == 0,
)
HASHES = [b"h%d" % n for n in range(6)]


@pytest.mark.parametrize(
    ("handed", "ready", "numbers"),
    [
        ([(0, 7, 8), (2, 9, 8)], 8, [1]),
        ([(0, 7, 8), (2, 9, 8), (2, 5, 24), (0, 4, 24)], 24, [1, 5]),
        ([(0, 7, 8), (2, 9, 8)], 7, []),  # not computed yet
        ([(0, 7, 8)], 8, []),  # one of two groups
        ([(0, 7, 8), (2, 0, 8)], 8, []),  # the null block
        ([(0, 7, 8), (2, 9, 8), (1, 3, 8)], 8, [1]),  # attention hands nothing over
        ([(0, 7, 6), (2, 9, 6)], 8, []),  # inside a block
        ([(0, 7, 0), (2, 9, 0)], 8, []),
        ([(0, 7, 28), (2, 9, 28)], 40, []),  # a block without a hash
        ([(0, 7, 8), (2, 9, 12)], 12, []),  # two ends
        ([(0, 7, 16), (2, 9, 16)], 16, []),  # offered before
        ([], 24, []),
    ],
)
def test_only_states_that_all_groups_hand_over_are_saved(
    handed: list[tuple[int, int, int]], ready: int, numbers: list[int]
) -> None:
    """C7: whole blocks, computed, with a hash and a place in the cache, and not offered before."""
    found = states.to_save(KINDS, handed, HASHES, ready, lambda number, _, kind: (number, kind) != (3, "state"))
    assert [n for part in found for n in part.numbers] == numbers
    for part in found:
        assert part.kind == "state"
        assert part.block_hashes == tuple(HASHES[n] for n in part.numbers)
        places = {(group, (n + 1) * 4): block for group, block, n in ((g, b, t // 4 - 1) for g, b, t in handed)}
        assert part.tables == tuple(tuple(places[g, (n + 1) * 4] for n in part.numbers) for g in (0, 2))


def test_states_are_never_saved_from_a_table() -> None:
    """C7: what lies in it may be on its way to another end of a block."""
    tables = ([5, 6], [1, 2, 3], [8, 9])
    blocks, left = KINDS.to_save(tables, HASHES, [0, 1], lambda *_: True, 100)
    assert [(part.kind, part.numbers) for part in blocks] == [("full", (0, 1))]
    assert left == []
    assert KINDS.shortest(tables) == 3
