"""Stages: vLLM's pipeline split, the common refinement, and what a rank holds of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.errors import LayoutError
from kvshare_layout.stages import common_boundaries, held_stages, layer_partition, stages_of


@pytest.mark.parametrize("hidden_layers", [*range(1, 41), 61, 64, 80, 126])
def test_the_split_is_vllms_own(hidden_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pipeline size, every rank, against vLLM's function."""
    utils = pytest.importorskip("vllm.distributed.utils")
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for pp in range(1, hidden_layers + 1):
        bounds = layer_partition(hidden_layers, pp)
        theirs = [utils.get_pp_indices(hidden_layers, rank, pp) for rank in range(pp)]
        assert [(bounds[r], bounds[r + 1]) for r in range(pp)] == theirs


@pytest.mark.parametrize(("layers", "pp"), [(3, 4), (0, 1), (4, 0), (4, -1)])
def test_impossible_splits_are_refused(layers: int, pp: int) -> None:
    """The message names both numbers."""
    with pytest.raises(LayoutError, match=rf"pipeline size {pp} given for {layers} layers"):
        layer_partition(layers, pp)


@given(st.integers(1, 100), st.data())
def test_ranks_of_every_pipeline_hold_consecutive_whole_stages(layers: int, data: st.DataObject) -> None:
    """The common refinement: no stage is cut by any size, and all ranks together hold each stage once."""
    sizes = data.draw(st.lists(st.integers(1, min(layers, 9)), min_size=1, max_size=4))
    kv_layers = data.draw(st.sets(st.integers(0, layers - 1), min_size=1))
    stages = stages_of(common_boundaries(layers, sizes), kv_layers)
    assert [layer for stage in stages for layer in stage.layers] == sorted(kv_layers)
    assert [stage.number for stage in stages] == list(range(len(stages)))
    assert all(stage.layers for stage in stages)
    for pp in sizes:
        bounds = layer_partition(layers, pp)
        held = [
            held_stages(stages, [i for i in kv_layers if bounds[rank] <= i < bounds[rank + 1]]) for rank in range(pp)
        ]
        assert [stage for part in held for stage in part] == list(stages)


@given(st.integers(2, 60), st.data())
def test_a_rank_with_a_part_of_a_stage_is_refused(layers: int, data: st.DataObject) -> None:
    """It could write an incomplete object under a complete name (case A14)."""
    stages = stages_of((0, layers), range(layers))
    held = data.draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=layers - 1))
    with pytest.raises(LayoutError, match="Store stage 0 held"):
        held_stages(stages, held)


def test_explicit_boundaries_replace_the_ones_of_the_sizes() -> None:
    """A pool with ``VLLM_PP_LAYER_PARTITION`` lists them; the ends are implied."""
    assert common_boundaries(10, [2], [7]) == (0, 7, 10)
    assert common_boundaries(10, [2], [0, 3, 3, 10]) == (0, 3, 10)
    with pytest.raises(LayoutError, match=r"\[11, -1\] given, 0 to 10 expected"):
        common_boundaries(10, [2], [11, -1, 5])


def test_all_impossible_sizes_are_named_at_once() -> None:
    """One sentence each."""
    with pytest.raises(LayoutError) as error:
        common_boundaries(4, [1, 5, 9, 5])
    assert len(error.value.mistakes) == 2


def test_layers_beyond_the_last_boundary_belong_to_the_last_stage() -> None:
    """Draft layers of speculative decoding."""
    stages = stages_of((0, 2, 4), [0, 1, 2, 3, 4, 5])
    assert [stage.layers for stage in stages] == [(0, 1), (2, 3, 4, 5)]


def test_layers_of_no_stage_are_refused() -> None:
    """They would never be stored."""
    with pytest.raises(LayoutError, match=r"layers \[9\] held that belong to no Store stage"):
        held_stages(stages_of((0, 2), [0, 1]), [0, 1, 9])
