"""Verdict: may this engine share, must it keep to itself, or must it not cache at all?

Pure: runs the table of ``checks`` and makes the decision that follows, with its namespace and objects. The scheduler
process decides once and sends the decision to the ranks; ranks compute neither verdict nor namespace.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvshare_layout import keys
from kvshare_layout.checks import (
    CHECKS,
    DISABLED,
    ISOLATED,
    SHARED,
    Case,
    identity_complete,
    kind_of,
    shared_plan,
    staging_problem,
)
from kvshare_layout.config import Parsed
from kvshare_layout.facts import EngineFacts, RankFacts
from kvshare_layout.fingerprint import fingerprint, flatten
from kvshare_layout.kinds import Kind
from kvshare_layout.objects import (
    HeldObject,
    ObjectId,
    isolated_object,
    object_bytes,
    object_ids,
    seal_bytes,
    shared_objects,
)
from kvshare_layout.stages import Stage

__all__ = [
    "CHECKS",
    "DISABLED",
    "ISOLATED",
    "SHARED",
    "Decision",
    "Verdict",
    "decide",
    "held_objects",
    "isolated_objects_of",
]


@dataclass(frozen=True)
class Verdict:
    """State, CamelCase reason and one sentence."""

    state: str
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """What an engine does, decided once.

    Attributes:
        verdict: the verdict.
        prefix: pool prefix.
        namespace: prefix of all keys; empty when disabled.
        fingerprint: digest of ``manifest``; empty when disabled.
        manifest: the fields behind the fingerprint, flattened to text.
        store_tp: S in use; 0 when disabled.
        kv_heads: total KV heads.
        kinds: the kinds, at most one today.
        stages: Store stages of the kind.
        tp: tensor-parallel size of the engine.
        objects: every object that a block has, with its bytes.
        draft_drop: see ``kinds.usable_blocks``.
    """

    verdict: Verdict
    prefix: str
    namespace: str = ""
    fingerprint: str = ""
    manifest: tuple[tuple[str, str], ...] = ()
    store_tp: int = 0
    kv_heads: int = 0
    kinds: tuple[Kind, ...] = ()
    stages: tuple[Stage, ...] = ()
    tp: int = 1
    objects: tuple[tuple[ObjectId, int], ...] = ()
    draft_drop: bool = False

    @property
    def caches(self) -> bool:
        """Whether anything is loaded or saved."""
        return self.verdict.state != DISABLED


def decide(parsed: Parsed, engine: EngineFacts, ranks: Sequence[RankFacts]) -> Decision:
    """Decide once for an engine, from its configuration, its own facts and those of all its ranks."""
    case = Case(parsed, engine, sorted(ranks, key=lambda facts: facts.rank))
    decision = _decided(case)
    sealed = seal_bytes(parsed.config.verify)
    if found := staging_problem(parsed.config, [size + sealed for _, size in decision.objects]):
        return Decision(Verdict(DISABLED, *found), decision.prefix)
    return decision


def _decided(case: Case) -> Decision:
    engine, prefix = case.engine, case.parsed.config.cache_namespace
    for state, check in CHECKS:
        if found := check(case):
            verdict = Verdict(state, *found)
            return Decision(verdict, prefix) if state == DISABLED else _isolated(case, verdict)
    kind, store_tp, stages = shared_plan(case)
    manifest = _manifest(case, kind, store_tp, [list(s.layers) for s in stages])
    digest = fingerprint(manifest)
    return Decision(
        Verdict(SHARED, "Shared", f"shares {store_tp} Store shards in {len(stages)} Store stages"),
        prefix,
        keys.namespace(prefix, digest),
        digest,
        tuple(sorted(flatten(manifest).items())),
        store_tp,
        engine.kv_heads,
        (kind,),
        stages,
        engine.tp,
        tuple((i, object_bytes(kind, store_tp, stages[i.stage])) for i in object_ids(kind, store_tp, stages)),
        engine.draft_drop,
    )


def _manifest(case: Case, kind: Kind, store_tp: int, stages: object) -> dict[str, object]:
    """Everything besides the pool prefix that changes bytes or the meaning of a key."""
    engine = case.engine
    verify = case.parsed.config.verify
    return {
        **engine.identity,
        # Objects with a digest have other sizes; without one nothing is added, so that older members are still met.
        **({"verify": verify} if seal_bytes(verify) else {}),
        "format": keys.FORMAT,
        "store_tp": store_tp,
        "stages": stages,
        "hash_algorithm": engine.hash_algorithm,
        "draft_drop": engine.draft_drop,
        f"kind.{kind.name}": {k: v for k, v in asdict(kind).items() if k != "name"},
    }


def _isolated(case: Case, verdict: Verdict) -> Decision:
    """A private, rank-local namespace: one opaque object per rank and block."""
    engine = case.engine
    kind = kind_of(case)
    manifest = _manifest(case, kind, 0, [])
    manifest["isolated"] = {
        "reason": verdict.reason, "tp": engine.tp, "pp": engine.pp, "dcp": engine.dcp, "pcp": engine.pcp,
        "layouts": [[layer.layout for layer in facts.layers] for facts in case.ranks],
        "layers": [[layer.index for layer in facts.layers] for facts in case.ranks],
        "heads": [[layer.heads for layer in facts.layers] for facts in case.ranks],
        # What a wrong configuration meant to say is unknown; engines with different mistakes do not meet.
        "mistakes": list(case.parsed.mistakes),
        "instance": "" if identity_complete(case) else engine.instance,
    }  # fmt: skip
    digest = fingerprint(manifest)
    prefix = case.parsed.config.cache_namespace
    held = [isolated_objects_of(kind, facts) for facts in case.ranks]
    return Decision(
        verdict, prefix, keys.namespace(prefix, digest, isolated=True), digest,
        tuple(sorted(flatten(manifest).items())), len(case.ranks), engine.kv_heads, (kind,), (), engine.tp,
        tuple((item.id, item.size) for item in held if item.size), engine.draft_drop,
    )  # fmt: skip


def isolated_objects_of(kind: Kind, facts: RankFacts) -> HeldObject:
    """The opaque object of one isolated rank."""
    heads = facts.layers[0].heads if facts.layers else 0
    return isolated_object(kind, rank=facts.rank, heads=heads, held_layers=[layer.index for layer in facts.layers])


def held_objects(decision: Decision, facts: RankFacts) -> tuple[HeldObject, ...]:
    """The objects of a block that the rank with ``facts`` writes and reads under ``decision``."""
    if not decision.caches or not facts.layers:
        return ()
    (kind,) = decision.kinds
    if decision.verdict.state == ISOLATED:
        return (isolated_objects_of(kind, facts),)
    return shared_objects(
        kind, decision.store_tp, decision.stages, tp=decision.tp, tp_rank=facts.tp_rank,
        held_layers=[layer.index for layer in facts.layers],
    )  # fmt: skip
