"""States: when the recurrent states of layers without attention may be stored beside attention.

Pure. The engine keeps one state of a layer per sequence and hands it over at the ends of some blocks. There it stands
for all tokens before it, so a hit may end there and nowhere else. A rank's state has no form that other TP sizes read:
it is moved whole, under a name that says TP size and form, and only the same rank of an equal engine finds it. The
attention beside it is shared by all sizes as ever.
"""

import hashlib
from collections.abc import Sequence

from kvshare_layout.facts import UNKNOWN, LayerFacts
from kvshare_layout.kinds import STATE

#: Hex digits of the form in keys: 64 bits.
_FORM_DIGITS = 16


def state_problem(attention: Sequence[LayerFacts], states: Sequence[LayerFacts], *, beside_others: bool) -> str:
    """Why these states keep the engine from caching, or an empty string.

    Args:
        attention: the attention caches of all ranks.
        states: the states of all ranks, at least one.
        beside_others: another connector stores and loads in the same engine.
    """
    for layer in states:
        if layer.encoding.startswith(UNKNOWN):
            return f"the state of layer {layer.index}: {layer.encoding.removeprefix(UNKNOWN)}"
    if wrong := sorted({x.index for x in (*attention, *states) if (x.cache == STATE) != (x.retention.rule == "state")}):
        return f"layers {wrong} given with the retention of one cache and the name of another"
    if not attention:
        return "states are cached beside attention, a model of states only given"
    if beside_others:
        return "another connector may load states too, and nobody says at which block they are right"
    found = sorted({(layer.encoding, layer.cell_bytes) for layer in states})
    if len(found) > 1:
        return f"states of {len(found)} forms given ({found}), one expected"
    tokens = sorted({layer.block_tokens for layer in (*attention, *states)})
    return "" if len(tokens) == 1 else f"blocks of {tokens} tokens given, one size for states and attention expected"


def form_of(encoding: str, cell_bytes: int) -> str:
    """Name of a form of states in keys: the same for equal encodings and sizes only."""
    return hashlib.sha256(f"{encoding}/{cell_bytes}".encode()).hexdigest()[:_FORM_DIGITS]
