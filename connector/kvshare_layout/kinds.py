"""Kinds: sets of layers with one cache geometry and one retention rule.

A kind owns one decision, ``needed``: which blocks a hit of n tokens rests on. Everything else (keys, plans, transfers)
is written for any number of kinds. Kinds are named by what they are, never by the engine's group index, which moves
with draft layers and with the physical layout.
"""

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


FULL = Retention("full")


@dataclass(frozen=True)
class Kind:
    """One kind of a model.

    Attributes:
        name: name in keys.
        retention: its retention rule.
        encoding: cell encoding id: what one cell holds. Different encodings are never exchanged.
        kv_heads: H, total KV heads of a layer over all ranks without replicas.
        cell_bytes: bytes of one head and one token (the C axis).
        block_tokens: tokens of a block (N).
        layers: KV-bearing layers of the kind, ascending indices of hidden layers.
    """

    name: str
    retention: Retention
    encoding: str
    kv_heads: int
    cell_bytes: int
    block_tokens: int
    layers: tuple[int, ...]

    def layer_bytes(self, heads: int) -> int:
        """Bytes of ``heads`` heads of one layer of one block."""
        return heads * self.block_tokens * self.cell_bytes


def usable_blocks(hit_blocks: int, *, draft_drop: bool) -> int:
    """Blocks that may be loaded out of ``hit_blocks`` found.

    With EAGLE-like drafting the last matched block must be computed again, because the draft needs the hidden states
    of its tokens (vLLM drops it from local hits in the same way). The drop is applied here and nowhere else.
    """
    return max(0, hit_blocks - 1) if draft_drop else hit_blocks


def needed(kind: Kind, hit_tokens: int) -> range:
    """Block numbers of a prompt that a hit of ``hit_tokens`` tokens needs.

    ``hit_tokens`` is a multiple of the block size. Full attention needs all blocks, a window of w tokens the last
    ``ceil((w - 1) / block_tokens)``, a state the one that ends at the boundary.
    """
    blocks = hit_tokens // kind.block_tokens
    if kind.retention.rule == "window":
        tail = -(-(kind.retention.window - 1) // kind.block_tokens)
        return range(max(0, blocks - tail), blocks)
    if kind.retention.rule == "state":
        return range(max(0, blocks - 1), blocks)
    return range(blocks)
