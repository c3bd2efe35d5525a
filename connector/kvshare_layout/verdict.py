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
    groups_of,
    identity_complete,
    kinds_of,
    layers_of,
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
        kinds: the kinds, full attention first, second caches of the same layers last; none when disabled.
        stages: Store stages of each kind.
        groups: the engine's cache groups with layers of each kind, ascending.
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
    stages: tuple[tuple[Stage, ...], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    tp: int = 1
    objects: tuple[tuple[ObjectId, int], ...] = ()
    draft_drop: bool = False

    @property
    def caches(self) -> bool:
        """Whether anything is loaded or saved."""
        return self.verdict.state != DISABLED

    @property
    def whole(self) -> bool:
        """Whether a load is right as a whole only.

        A part of a load of full attention in one cache group is a shorter hit. With a window it is not, because the
        blocks that the shorter one needs may be others; and the engine accepts blocks by number from one group only.
        """
        return any(kind.retention.rule != "full" for kind in self.kinds) or len(set().union(*self.groups)) > 1

    @property
    def blocks(self) -> tuple[tuple[Kind, tuple[int, ...]], ...]:
        """What the engine has block tables for: the first kind of every retention rule, and its cache groups.

        Further kinds of the rule lie in the same blocks.
        """
        pairs = zip(self.kinds, self.groups, strict=True)
        return tuple((kind, groups) for kind, groups in pairs if kind.name == kind.retention.name)

    def objects_of(self, kind: Kind) -> tuple[ObjectId, ...]:
        """The objects that a block with the retention of ``kind`` has, of all kinds that lie in it."""
        names = {other.name_in_keys for other in self.kinds if other.retention == kind.retention}
        return tuple(id_ for id_, _ in self.objects if id_.kind in names)


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
    store_tp, planned = shared_plan(case)
    kinds, stages = tuple(kind for kind, _ in planned), tuple(stages for _, stages in planned)
    manifest = _manifest(case, kinds, store_tp, stages)
    digest = fingerprint(manifest)
    common = [len(cut) for kind, cut in planned if not kind.ranks]
    what = f"shares {store_tp} Store shards in {max(common)} Store stages"
    if kinds != (kinds[0],) or kinds[0].retention.rule != "full":
        what += f" of each of its kinds: {', '.join(kind.words for kind in kinds)}"
    if any(kind.ranks for kind in kinds):
        what += f"; states are read by members of TP {engine.tp} only, so others find nothing that ends at a state"
    return Decision(
        Verdict(SHARED, "Shared", what),
        prefix,
        keys.namespace(prefix, digest),
        digest,
        tuple(sorted(flatten(manifest).items())),
        store_tp,
        engine.kv_heads,
        kinds,
        stages,
        tuple(groups_of(case, kind) for kind in kinds),
        engine.tp,
        tuple(
            (i, object_bytes(kind, store_tp, cut[i.stage]))
            for kind, cut in planned
            for i in object_ids(kind, store_tp, cut)
        ),
        engine.draft_drop,
    )


def _manifest(case: Case, kinds: Sequence[Kind], store_tp: int, stages: Sequence[Sequence[Stage]]) -> dict[str, object]:
    """Everything besides the pool prefix that changes bytes or the meaning of a key.

    The stages of further kinds have fields of their own, so that members with one kind keep the fingerprint they had.
    """
    engine = case.engine
    cuts = [[list(stage.layers) for stage in cut] for cut in stages] or [[]]
    verify = case.parsed.config.verify
    return {
        **engine.identity,
        # Objects with a digest have other sizes; without one nothing is added, so that older members are still met.
        **({"verify": verify} if seal_bytes(verify) else {}),
        "format": keys.FORMAT,
        "store_tp": store_tp,
        "stages": cuts[0],
        **{f"stages.{kind.name}": cut for kind, cut in zip(kinds[1:], cuts[1:], strict=False)},
        "hash_algorithm": engine.hash_algorithm,
        "draft_drop": engine.draft_drop,
        **{f"kind.{kind.name}": _fields(kind) for kind in kinds},
    }


def _fields(kind: Kind) -> dict[str, object]:
    """What all members must agree about. Ranks' own parts differ by TP size: their keys have their form instead."""
    local = ("encoding", "kv_heads", "cell_bytes") if kind.ranks else ()
    return {name: value for name, value in asdict(kind).items() if name not in ("name", "ranks", "form", *local)}


def _isolated(case: Case, verdict: Verdict) -> Decision:
    """A private, rank-local namespace: one opaque object per rank, kind and block."""
    engine = case.engine
    kinds = kinds_of(case)
    manifest = _manifest(case, kinds, 0, ())
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
    held = [item for kind in kinds for facts in case.ranks for item in isolated_objects_of(kind, facts)]
    return Decision(
        verdict, prefix, keys.namespace(prefix, digest, isolated=True), digest,
        tuple(sorted(flatten(manifest).items())), len(case.ranks), engine.kv_heads, kinds, (),
        tuple(groups_of(case, kind) for kind in kinds), engine.tp,
        tuple((item.id, item.size) for item in held), engine.draft_drop,
    )  # fmt: skip


def isolated_objects_of(kind: Kind, facts: RankFacts) -> tuple[HeldObject, ...]:
    """The opaque object of one isolated rank; none when it holds no layer of the kind."""
    layers = layers_of(kind, facts)
    held = [layer.index for layer in layers]
    return (isolated_object(kind, rank=facts.rank, heads=layers[0].heads, held_layers=held),) if layers else ()


def held_objects(decision: Decision, facts: RankFacts) -> tuple[HeldObject, ...]:
    """The objects of a block that the rank with ``facts`` writes and reads under ``decision``."""
    if not decision.caches or not facts.layers:
        return ()
    if decision.verdict.state == ISOLATED:
        return tuple(item for kind in decision.kinds for item in isolated_objects_of(kind, facts))
    return tuple(
        item
        for kind, stages in zip(decision.kinds, decision.stages, strict=True)
        for item in shared_objects(
            kind, decision.store_tp, stages, tp=decision.tp, tp_rank=facts.tp_rank,
            held_layers=[layer.index for layer in layers_of(kind, facts)],
        )
    )  # fmt: skip
