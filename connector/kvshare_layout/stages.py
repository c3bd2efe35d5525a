"""Stages: how the layers of a model are cut into Store stages, independent of any pod's pipeline split.

Pure arithmetic on layer numbers. With one pipeline size the stages are vLLM's own partition; with several they are the
common refinement, the union of all boundaries. A pipeline rank then holds consecutive whole stages, exactly as a
tensor-parallel rank holds consecutive whole shards.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvshare_layout.errors import LayoutError


def layer_partition(hidden_layers: int, pp: int) -> tuple[int, ...]:
    """Boundaries of vLLM's default pipeline split, ``pp + 1`` numbers from 0 to ``hidden_layers``.

    The rule of ``vllm.distributed.utils.get_pp_indices``: equal parts, and what remains goes one layer each to the
    parts from the last but one backwards (the last part already carries the output head).

    Raises:
        LayoutError: fewer layers than stages, or a size below 1.
    """
    if pp < 1 or hidden_layers < pp:
        raise LayoutError(
            f"pipeline size {pp} given for {hidden_layers} layers, 1 to {hidden_layers} expected: use a smaller size"
        )
    parts = [hidden_layers // pp] * pp
    for i in range(2, hidden_layers % pp + 2):
        parts[-i] += 1
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + part)
    return tuple(bounds)


def common_boundaries(
    hidden_layers: int, pipeline_sizes: Iterable[int], explicit: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Boundaries of the Store stages: 0, ..., ``hidden_layers``, strictly growing.

    Args:
        hidden_layers: number of hidden layers of the model.
        pipeline_sizes: all pipeline sizes of the pool.
        explicit: inner boundaries that a pool lists because its members use ``VLLM_PP_LAYER_PARTITION``; they replace
            the ones that would follow from the sizes.

    Raises:
        LayoutError: with every mistake found.
    """
    if explicit:
        bad = [b for b in explicit if not 0 <= b <= hidden_layers]
        if bad:
            raise LayoutError(
                f"stage boundaries {bad} given, 0 to {hidden_layers} expected for this model: correct the pool"
            )
        return tuple(sorted({0, hidden_layers, *explicit}))
    bounds = {0, hidden_layers}
    mistakes: list[str] = []
    for pp in sorted(set(pipeline_sizes) or {1}):
        try:
            bounds.update(layer_partition(hidden_layers, pp))
        except LayoutError as error:
            mistakes.extend(error.mistakes)
    if mistakes:
        raise LayoutError(mistakes)
    return tuple(sorted(bounds))


@dataclass(frozen=True)
class Stage:
    """One Store stage.

    Attributes:
        number: position among the stages that have KV layers, from 0: the ``p`` of an object's key.
        layers: the KV-bearing layers of the stage, ascending indices of hidden layers.
    """

    number: int
    layers: tuple[int, ...]


def stages_of(boundaries: Sequence[int], kv_layers: Iterable[int]) -> tuple[Stage, ...]:
    """Cut the KV-bearing layers at ``boundaries``; stages without KV layers do not exist.

    Layers at or beyond the last boundary (draft layers of speculative decoding) belong to the last stage.
    """
    cells: dict[int, list[int]] = {}
    last = len(boundaries) - 2
    for layer in sorted(set(kv_layers)):
        cells.setdefault(min(bisect_right(boundaries, layer) - 1, last), []).append(layer)
    return tuple(Stage(n, tuple(cells[cell])) for n, cell in enumerate(sorted(cells)))


def held_stages(stages: Sequence[Stage], held_layers: Iterable[int]) -> tuple[Stage, ...]:
    """The stages that a pipeline rank with ``held_layers`` holds.

    Raises:
        LayoutError: the rank holds only a part of a stage, so it could neither write nor read whole objects.
    """
    held = set(held_layers)
    out: list[Stage] = []
    mistakes: list[str] = []
    for stage in stages:
        inside = [layer for layer in stage.layers if layer in held]
        if len(inside) == len(stage.layers):
            out.append(stage)
        elif inside:
            mistakes.append(
                f"layers {inside} of Store stage {stage.number} held, all of {list(stage.layers)} or none expected: "
                "list this pod's pipeline size in the pool, and let vLLM split the layers itself"
            )
    unknown = sorted(held - {layer for stage in stages for layer in stage.layers})
    if unknown:
        mistakes.append(f"layers {unknown} held that belong to no Store stage")
    if mistakes:
        raise LayoutError(mistakes)
    return tuple(out)
