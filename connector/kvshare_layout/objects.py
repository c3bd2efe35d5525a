"""Objects: the bytes of a canonical object, which of them a rank holds, and the proof that nothing is missing.

A canonical object is one block, one kind, one Store shard, one Store stage: layer by layer, each layer dense
``[H/S, N, C]`` (head-major). Since S is a multiple of every effective TP size and stages refine every pipeline split, a
rank always holds whole objects. A recurrent state has no such form: its objects are one layer of one rank each.

This module says where the parts of an object lie in the rank's own layers; it knows nothing of addresses, strides or
tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvshare_layout.errors import LayoutError
from kvshare_layout.heads import head_share
from kvshare_layout.kinds import Kind
from kvshare_layout.stages import Stage, held_stages

#: Bytes of the digest that follows an object's own bytes in the store where ``verify`` is ``checksum``.
SEAL_BYTES = 16


def seal_bytes(verify: str) -> int:
    """Bytes that follow an object's own in the store, by what proves a load."""
    return SEAL_BYTES if verify == "checksum" else 0


@dataclass(frozen=True, order=True)
class ObjectId:
    """Which object of a block: kind name, Store shard, Store stage."""

    kind: str
    shard: int
    stage: int


@dataclass(frozen=True)
class Run:
    """Consecutive bytes of an object that are one layer's heads on a rank.

    Attributes:
        offset: first byte inside the object.
        size: bytes.
        layer: index of the hidden layer.
        head_start: first of the heads, counted on the rank.
        heads: number of heads; dense ``[heads, N, C]`` inside the object.
    """

    offset: int
    size: int
    layer: int
    head_start: int
    heads: int


@dataclass(frozen=True)
class HeldObject:
    """An object as one rank holds it.

    Attributes:
        id: which object.
        size: bytes of the whole object.
        runs: its bytes in ascending offsets, covering it completely.
        replica: this rank's number among the ranks that hold the same bytes.
        replicas: how many such ranks there are.
        blocks: the retention's name: in whose blocks of the engine it lies, together with other kinds of that rule.
        cache: which cache of its layers it is of, see ``Kind.cache``.
    """

    id: ObjectId
    size: int
    runs: tuple[Run, ...]
    replica: int
    replicas: int
    blocks: str
    cache: str = ""

    def writes(self, block_number: int) -> bool:
        """Whether this rank is the one among its replicas that writes block ``block_number`` of a prompt."""
        return block_number % self.replicas == self.replica


def object_bytes(kind: Kind, store_tp: int, stage: Stage) -> int:
    """Bytes of one canonical object of ``stage``."""
    return len(stage.layers) * kind.layer_bytes(kind.kv_heads // store_tp)


def object_ids(kind: Kind, store_tp: int, stages: Sequence[Stage]) -> tuple[ObjectId, ...]:
    """All objects of a block, in ascending order."""
    shards = range(kind.shards(store_tp))
    return tuple(ObjectId(kind.name_in_keys, shard, stage.number) for shard in shards for stage in stages)


def _held(
    kind: Kind, id_: ObjectId, layers: Sequence[int], head_start: int, heads: int, replica: int, replicas: int
) -> HeldObject:
    size = kind.layer_bytes(heads)
    runs = tuple(Run(i * size, size, layer, head_start, heads) for i, layer in enumerate(layers))
    return HeldObject(id_, len(layers) * size, runs, replica, replicas, kind.retention.name, kind.cache)


def shared_objects(
    kind: Kind, store_tp: int, stages: Sequence[Stage], *, tp: int, tp_rank: int, held_layers: Iterable[int]
) -> tuple[HeldObject, ...]:
    """The canonical objects that a rank holds.

    Args:
        kind: the kind.
        store_tp: S, normalised.
        stages: all Store stages of the kind.
        tp: tensor-parallel size of the rank's engine.
        tp_rank: the rank's tensor-parallel rank.
        held_layers: the layers of the kind on this rank.

    Raises:
        LayoutError: the rank does not hold whole objects.
    """
    if kind.ranks:
        return tuple(
            _held(kind, ObjectId(kind.name_in_keys, tp_rank, stage.number), stage.layers, 0, 1, 0, 1)
            for stage in held_stages(stages, held_layers)
        )
    share = head_share(tp, tp_rank, kind.kv_heads, store_tp)
    heads = kind.kv_heads // store_tp
    return tuple(
        _held(
            kind,
            ObjectId(kind.name_in_keys, shard, stage.number),
            stage.layers,
            (shard - share.shards.start) * heads,
            heads,
            share.replica,
            share.replicas,
        )
        for shard in share.shards
        for stage in held_stages(stages, held_layers)
    )


def isolated_object(kind: Kind, *, rank: int, heads: int, held_layers: Iterable[int]) -> HeldObject:
    """The one opaque object per block of an isolated rank: everything it holds, as shard ``rank`` of stage 0."""
    return _held(kind, ObjectId(kind.name_in_keys, rank, 0), sorted(held_layers), 0, heads, 0, 1)


def prove_tiling(sizes: Mapping[ObjectId, int], held: Iterable[HeldObject], block_number: int = 0) -> None:
    """Prove that the ranks which write ``block_number`` cover every object exactly once.

    Args:
        sizes: bytes of every object that a block has.
        held: the objects of all ranks of one engine.
        block_number: the block of a prompt, which decides among replicas.

    Raises:
        LayoutError: naming every object with a gap, an overlap, another size, or no place among ``sizes``.
    """
    runs: dict[ObjectId, list[tuple[int, int]]] = {id_: [] for id_ in sizes}
    mistakes: list[str] = []
    for item in held:
        if item.id not in runs:
            mistakes.append(f"object {item.id} is held but does not exist")
        elif item.size != sizes[item.id]:
            mistakes.append(f"object {item.id} has {item.size} bytes on a rank, {sizes[item.id]} expected")
        elif item.writes(block_number):
            runs[item.id].extend((run.offset, run.size) for run in item.runs)
    for id_, parts in runs.items():
        position = 0
        for offset, size in sorted(parts):
            if offset != position:
                mistakes.append(f"object {id_} has {'a gap' if offset > position else 'an overlap'} at byte {offset}")
                break
            position += size
        else:
            if position != sizes[id_]:
                mistakes.append(f"object {id_} is covered up to byte {position} of {sizes[id_]}")
    if mistakes:
        raise LayoutError(mistakes)
