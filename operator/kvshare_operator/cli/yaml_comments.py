"""Comments at the end of a YAML block belong to what follows it.

Why this exists: ruamel.yaml hangs the blank lines and comments between two blocks on the last value of the
first one. Whoever appends to that block must move them behind the addition, or the comment of the next
section ends up in the middle of this one.
"""

from __future__ import annotations

from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark
from ruamel.yaml.tokens import CommentToken


def _slot(node: Any) -> tuple[Any, Any, int] | None:
    """Return (comments, key, place) of the deepest last value of a block; None if there is nothing in it."""
    while isinstance(node, (CommentedMap, CommentedSeq)) and len(node):
        key = list(node)[-1] if isinstance(node, CommentedMap) else len(node) - 1
        inner = node[key]
        if not isinstance(inner, (CommentedMap, CommentedSeq)) or not len(inner) or inner.fa.flow_style():
            return node.ca.items, key, 2 if isinstance(node, CommentedMap) else 0
        node = inner
    return None


def take_trailing(node: Any) -> str:
    """Cut off and return what follows the last value's own line; an empty text if nothing does."""
    slot = _slot(node)
    if slot is None or node.fa.flow_style():
        return ""
    items, key, place = slot
    token = (items.get(key) or [None] * 4)[place]
    if not isinstance(token, CommentToken):
        return ""
    own, newline, rest = token.value.partition("\n")
    if not rest:
        return ""
    if own.strip():
        token.value = own + newline
    else:
        items[key][place] = None
    return f"{newline}{rest}"


def keep_last(node: Any, text: str) -> None:
    """Hang a text that ``take_trailing`` gave behind the last value."""
    if not text:
        return
    slot = _slot(node)
    if slot is None:
        return
    items, key, place = slot
    entry = items.setdefault(key, [None] * 4)
    token = entry[place]
    if isinstance(token, CommentToken):
        token.value = token.value.rstrip("\n") + text
    else:
        entry[place] = CommentToken(text, CommentMark(0), None)
