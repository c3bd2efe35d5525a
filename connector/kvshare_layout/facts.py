"""Facts: what each rank and the engine's scheduler know, as plain values.

May live here: frozen records and the check that the ranks' facts fit together. The records are made at the edges (from
tensors, specifications and the engine's configuration) and travel as JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kvshare_layout.errors import LayoutError
from kvshare_layout.kinds import Retention

#: What begins the encoding of a cache whose bytes are not known; what follows says why.
UNKNOWN = "unknown:"


@dataclass(frozen=True)
class LayerFacts:
    """One layer's cache as a rank sees it.

    Attributes:
        name: the engine's name of the layer.
        index: index of the hidden layer.
        retention: retention rule.
        encoding: cell encoding id.
        sliceable: heads can be moved one by one. False for encodings in which heads share bytes.
        heads: slots along H on this rank.
        cell_bytes: bytes of one slot and one token; of the whole state where the cache is one.
        block_tokens: tokens of a block.
        layout: physical layout found in the real strides; ``other`` when no name fits.
        group: the engine's number of the cache group whose block tables say where the layer's blocks are.
        cache: which of the layer's caches: empty for its attention, ``indexer`` for the keys of an indexer, ``state``
            for a recurrent state.
    """

    name: str
    index: int
    retention: Retention
    encoding: str
    sliceable: bool
    heads: int
    cell_bytes: int
    block_tokens: int
    layout: str
    group: int = 0
    cache: str = ""

    @property
    def kind(self) -> str:
        """Name of the kind that this cache is of."""
        return self.cache or self.retention.name


@dataclass(frozen=True)
class RankFacts:
    """Everything one rank knows about its caches.

    Attributes:
        rank: rank inside the engine, ``pp_rank * tp + tp_rank``.
        tp_rank: tensor-parallel rank.
        pp_rank: pipeline rank.
        layers: the caches of the KV-bearing layers it holds, ascending indices.
        problems: what keeps this rank from caching at all, each ``Reason: sentence``.
    """

    rank: int
    tp_rank: int
    pp_rank: int
    layers: tuple[LayerFacts, ...]
    problems: tuple[str, ...] = ()

    @property
    def layouts(self) -> tuple[str, ...]:
        """Physical layouts of its caches. A state has no heads and tokens, so it has none."""
        return tuple(sorted({layer.layout for layer in self.layers if layer.retention.rule != "state"}))

    def to_json(self) -> str:
        """The facts as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "RankFacts":
        """Read ``to_json`` back."""
        data = json.loads(text)
        layers = tuple(
            LayerFacts(**{**layer, "retention": Retention(**layer["retention"])}) for layer in data["layers"]
        )
        return RankFacts(data["rank"], data["tp_rank"], data["pp_rank"], layers, tuple(data["problems"]))


@dataclass(frozen=True)
class EngineFacts:
    """What the scheduler process knows.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        dcp: decode context-parallel size.
        pcp: prefill context-parallel size.
        kv_heads: total KV heads of the model; 1 for MLA.
        hidden_layers: number of hidden layers without draft layers.
        cache_groups: number of the engine's KV-cache groups, scratch groups included.
        block_tokens: tokens of a block of the scheduler.
        hash_block_tokens: tokens of one block hash.
        hash_algorithm: the engine's name of it.
        hash_reproducible: two processes with equal settings give equal hashes.
        speculates: the engine decodes speculatively, by whatever method, also one that leaves ``identity`` alone.
        draft_drop: the engine drops the last matched block (EAGLE-like drafting).
        identity: facts of the model and engine that change bytes, plain JSON values by field name (digest of the
            model configuration, of the weights, dtypes, quantisation, hash scheme, canary, speculative layers).
        weights_problem: why the weights have no digest, or an empty string.
        problem: what keeps the engine from caching at all, ``Reason: sentence``, or an empty string.
        instance: text that no other engine start has; separates engines whose identity is incomplete.
    """

    tp: int
    pp: int
    dcp: int
    pcp: int
    kv_heads: int
    hidden_layers: int
    cache_groups: int
    block_tokens: int
    hash_block_tokens: int
    hash_algorithm: str
    hash_reproducible: bool
    speculates: bool
    draft_drop: bool
    identity: Mapping[str, object]
    weights_problem: str
    problem: str
    instance: str


def check_ranks(engine: EngineFacts, ranks: Sequence[RankFacts]) -> None:
    """Check that the ranks' facts are complete and that tensor-parallel neighbours agree.

    Raises:
        LayoutError: with every contradiction found.
    """
    mistakes: list[str] = []
    world = engine.tp * engine.pp
    found = sorted(facts.rank for facts in ranks)
    if found != list(range(world)):
        mistakes.append(f"facts of ranks {found} given, all of 0 to {world - 1} once expected")
    first_of_stage: dict[int, RankFacts] = {}
    for facts in sorted(ranks, key=lambda f: f.rank):
        if facts.rank != facts.pp_rank * engine.tp + facts.tp_rank:
            mistakes.append(f"rank {facts.rank} says TP rank {facts.tp_rank} and PP rank {facts.pp_rank}")
        first = first_of_stage.setdefault(facts.pp_rank, facts)
        for mine, other in zip(facts.layers, first.layers, strict=False):
            if _comparable(mine) != _comparable(other):
                mistakes.append(f"ranks {facts.rank} and {first.rank} disagree about layer {mine.name}")
        if len(facts.layers) != len(first.layers):
            mistakes.append(f"ranks {facts.rank} and {first.rank} hold different numbers of layers")
    seen: dict[int, int] = {}
    for facts in first_of_stage.values():
        for layer in facts.layers:
            if seen.setdefault(layer.index, facts.pp_rank) != facts.pp_rank:
                mistakes.append(f"layer {layer.index} is held by two pipeline ranks")
    if mistakes:
        raise LayoutError(mistakes)


def _comparable(layer: LayerFacts) -> tuple[object, ...]:
    """What tensor-parallel neighbours must agree about: everything but the physical layout."""
    return tuple(value for name, value in asdict(layer).items() if name != "layout")
