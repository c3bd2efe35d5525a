"""The layout protocol of KVShare: how a KV block becomes canonical objects, and under which keys.

Pure Python, standard library only, no I/O. The operator that writes a configuration and the connector that reads it
import the same functions from here.
"""

from kvshare_layout.config import ConnectorConfig, Parsed, parse, to_dotted_flags, to_extra_config
from kvshare_layout.errors import LayoutError
from kvshare_layout.facts import EngineFacts, LayerFacts, RankFacts
from kvshare_layout.heads import HeadShare, StoreTP, head_share, normalise_store_tp, resolve_store_tp
from kvshare_layout.keys import object_key, pool_prefix
from kvshare_layout.kinds import Kind, Retention
from kvshare_layout.objects import HeldObject, ObjectId, prove_tiling, shared_objects
from kvshare_layout.reports import MemberReport
from kvshare_layout.stages import Stage, common_boundaries, layer_partition, stages_of
from kvshare_layout.verdict import Decision, Verdict, decide, held_objects

__all__ = [
    "ConnectorConfig",
    "Decision",
    "EngineFacts",
    "HeadShare",
    "HeldObject",
    "Kind",
    "LayerFacts",
    "LayoutError",
    "MemberReport",
    "ObjectId",
    "Parsed",
    "RankFacts",
    "Retention",
    "Stage",
    "StoreTP",
    "Verdict",
    "common_boundaries",
    "decide",
    "head_share",
    "held_objects",
    "layer_partition",
    "normalise_store_tp",
    "object_key",
    "parse",
    "pool_prefix",
    "prove_tiling",
    "resolve_store_tp",
    "shared_objects",
    "stages_of",
    "to_dotted_flags",
    "to_extra_config",
]
