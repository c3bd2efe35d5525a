"""Kinds: sets of layers with one cache geometry and one retention rule.

A kind owns one decision, ``needed``: which blocks a hit of n tokens rests on. Everything else (keys, plans, transfers)
is written for any number of kinds. Kinds are named by what they are, never by the engine's group index, which moves
with draft layers and with the physical layout. Kinds of one retention rule lie in the same blocks of the engine, so a
block has the objects of all of them or it is missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """How long a kind's blocks stay useful.

    Attributes:
        rule: ``full`` attends to all earlier tokens, ``window`` to the last ``window`` ones, ``state`` keeps one
            recurrent state at a boundary.
        window: tokens of the window, 0 for the other rules.
    """

    rule: str
    window: int = 0

    @property
    def name(self) -> str:
        """Name of a kind with this rule, as it stands in keys."""
        return f"window{self.window}-" if self.rule == "window" else self.rule

    @property
    def words(self) -> str:
        """The rule for people."""
        return f"window of {self.window} tokens" if self.rule == "window" else self.rule


FULL = Retention("full")

#: Name of the kind of an indexer's keys: a second cache of layers with sparse attention, in the blocks of the first.
INDEXER = "indexer"
#: Name of the kind of recurrent states.
STATE = "state"


@dataclass(frozen=True)
class Kind:
    """One kind of a model.

    Attributes:
        name: name in keys: its retention's, or what the cache is where a layer has a second one.
        retention: its retention rule.
        encoding: cell encoding id: what one cell holds. Different encodings are never exchanged.
        kv_heads: H, total KV heads of a layer over all ranks without replicas.
        cell_bytes: bytes of one head and one token (the C axis); of a rank's whole state of a layer where there is one.
        block_tokens: tokens of a block (N).
        layers: KV-bearing layers of the kind, ascending indices of hidden layers.
        ranks: 0 where the cache is cut by heads, so that all TP sizes read it. Else the TP size whose ranks have a part
            each that only the same rank of an engine of that size reads.
        form: what tells such parts apart from those of another size or with other bytes; empty for heads.
    """

    name: str
    retention: Retention
    encoding: str
    kv_heads: int
    cell_bytes: int
    block_tokens: int
    layers: tuple[int, ...]
    ranks: int = 0
    form: str = ""

    @property
    def name_in_keys(self) -> str:
        """The kind's name in keys: parts of ranks have their form in it, for the namespace does not know it."""
        return f"{self.name}-tp{self.ranks}-{self.form}-" if self.ranks else self.name

    @property
    def cache(self) -> str:
        """Which cache of a layer: empty for its attention's."""
        return self.name if self.name in (INDEXER, STATE) else ""

    @property
    def words(self) -> str:
        """The kind for people."""
        return self.retention.words if self.name == self.retention.name else self.name

    def shards(self, store_tp: int) -> int:
        """Shards of a block: ``store_tp`` of its heads, or one for every rank."""
        return self.ranks or store_tp

    def layer_bytes(self, heads: int) -> int:
        """Bytes of ``heads`` heads of one layer of one block; of a rank's state in whatever block."""
        return self.cell_bytes if self.ranks else heads * self.block_tokens * self.cell_bytes


def usable_blocks(hit_blocks: int, *, draft_drop: bool) -> int:
    """Blocks that may be loaded out of ``hit_blocks`` found.

    With EAGLE-like drafting the last matched block must be computed again, because the draft needs the hidden states
    of its tokens (vLLM drops it from local hits in the same way). The drop is applied here and nowhere else; where
    there are windows, the search has taken care that the shorter hit is valid too (``spare``).
    """
    return max(0, hit_blocks - 1) if draft_drop else hit_blocks


def needed(kind: Kind, hit_tokens: int, *, spare: int = 0) -> range:
    """Block numbers of a prompt that a hit of ``hit_tokens`` tokens needs.

    ``hit_tokens`` is a multiple of the block size. Full attention needs all blocks, a window of w tokens the last
    ``ceil((w - 1) / block_tokens)``, a state the one that ends at the boundary. With ``spare`` the hit must be valid
    when so many blocks are taken from its end, too: a window then reaches further back.
    """
    blocks = hit_tokens // kind.block_tokens
    if kind.retention.rule == "window":
        tail = -(-(kind.retention.window - 1) // kind.block_tokens)
        # A window of one token looks at no block, however many are taken from the end.
        return range(max(0, blocks - tail - spare) if tail else blocks, blocks)
    if kind.retention.rule == "state":
        return range(max(0, blocks - 1 - spare), blocks)
    return range(blocks)


@dataclass(frozen=True)
class Unknown:
    """A block of a kind about which a search must be told before it can go on.

    Attributes:
        kind: the kind.
        number: number of the block in its prompt.
    """

    kind: Kind
    number: int


def longest_hit(
    kinds: Sequence[Kind], blocks: int, known: Callable[[Kind, int], bool | None], *, have: int = 0, spare: int = 0
) -> int | Unknown:
    """Blocks of the longest hit for which every kind has what it needs; ``have`` when there is none beyond it.

    A missing block of full attention ends every longer hit. A missing block of a window ends only those hits whose
    window reaches it, so a longer hit than up to there may be valid; the search goes from the longest one downwards.

    Args:
        kinds: all kinds of the model; one block size.
        blocks: largest hit of interest, in blocks.
        known: whether a block of a kind is there; None when nobody has looked yet.
        have: a hit of so many blocks needs nothing: what it rests on is here already.
        spare: see ``needed``.

    Returns:
        the number of blocks, or what must be known first.
    """
    end = blocks
    for kind in (kind for kind in kinds if kind.retention.rule == "full"):
        for number in range(have, end):
            if (there := known(kind, number)) is None:
                return Unknown(kind, number)
            if not there:
                end = number
                break
    others = [kind for kind in kinds if kind.retention.rule != "full"]
    stable = False
    while not stable and end > have:
        stable = True
        for kind in others:
            # Every hit between the last missing block and ``end`` needs that block too.
            first = needed(kind, end * kind.block_tokens, spare=spare).start
            for number in reversed(range(max(have, first), end)):
                if (there := known(kind, number)) is None:
                    return Unknown(kind, number)
                if not there:
                    end, stable = number, False
                    break
    return max(end, have)
