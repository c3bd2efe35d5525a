"""Generators shared by the property tests: topologies, engines and their facts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from kvshare_layout.config import ConnectorConfig, Parsed
from kvshare_layout.facts import EngineFacts, LayerFacts, RankFacts
from kvshare_layout.heads import effective_tp
from kvshare_layout.kinds import FULL, Kind
from kvshare_layout.stages import layer_partition

#: Everything that an engine's identity is made of in these tests.
IDENTITY: dict[str, object] = {
    "model_config": "a" * 16,
    "weights": "b" * 16,
    "model_dtype": "torch.bfloat16",
    "cache_dtype": "auto",
    "quantization": None,
    "hash_scheme": 2,
    "hash_canary": ["00", "11", "22", "33"],
    "speculative_layers": 0,
}


def tp_sizes(kv_heads: int, largest: int = 256) -> list[int]:
    """All TP sizes up to ``largest`` that vLLM accepts for ``kv_heads``."""
    return [tp for tp in range(1, largest + 1) if kv_heads % tp == 0 or tp % kv_heads == 0]


kv_heads = st.integers(1, 128)


@dataclass(frozen=True)
class Pool:
    """A pool: H, and TP sizes that vLLM accepts for it."""

    kv_heads: int
    sizes: tuple[int, ...]


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Pools of one to five TP sizes."""
    heads = draw(kv_heads)
    sizes = draw(st.lists(st.sampled_from(tp_sizes(heads)), min_size=1, max_size=5))
    return Pool(heads, tuple(sizes))


def kind_of(heads: int, layers: Sequence[int], *, cell_bytes: int = 8, block_tokens: int = 2) -> Kind:
    """A full-attention kind."""
    return Kind("full", FULL, "kv-packed", heads, cell_bytes, block_tokens, tuple(layers))


def engine_facts(tp: int, pp: int, heads: int, layers: int, **changes: object) -> EngineFacts:
    """Facts of an engine that may share."""
    facts = EngineFacts(
        tp=tp,
        pp=pp,
        dcp=1,
        pcp=1,
        kv_heads=heads,
        hidden_layers=layers,
        cache_groups=1,
        block_tokens=16,
        hash_block_tokens=16,
        hash_algorithm="sha256_cbor",
        hash_reproducible=True,
        speculates=False,
        draft_drop=False,
        identity=IDENTITY,
        weights_problem="",
        problem="",
        instance=f"instance of TP {tp} PP {pp}",
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def rank_facts(engine: EngineFacts, **changes: object) -> tuple[RankFacts, ...]:
    """Facts of all ranks of ``engine``; ``changes`` are of every layer."""
    bounds = layer_partition(engine.hidden_layers, engine.pp)
    heads = engine.kv_heads // effective_tp(engine.tp, engine.kv_heads)
    out: list[RankFacts] = []
    for pp_rank in range(engine.pp):
        layers = tuple(
            replace(
                LayerFacts(f"layers.{i}", i, FULL, "kv-packed", True, heads, 256, engine.block_tokens, "LBHNC"),
                **changes,  # type: ignore[arg-type]
            )
            for i in range(bounds[pp_rank], bounds[pp_rank + 1])
        )
        out += [RankFacts(pp_rank * engine.tp + r, r, pp_rank, layers) for r in range(engine.tp)]
    return tuple(out)


def parsed(**values: object) -> Parsed:
    """A configuration without mistakes."""
    return Parsed(ConnectorConfig(**values), ())  # type: ignore[arg-type]
