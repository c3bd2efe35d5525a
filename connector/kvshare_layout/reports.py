"""Reports: what a member tells the operator about itself, and how the operator reads it without trusting it.

Pure conversion between a frozen object and JSON. The body is what an engine's scheduler process posts to
``/v1/report`` once after start-up and after every change of its verdict.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from kvshare_layout.errors import LayoutError

#: Version of the body; another version is refused with a clear answer.
VERSION = 1
#: Largest body that is read, bytes.
MAX_BYTES = 64 * 1024
VERDICTS = ("shared", "isolated", "disabled")


@dataclass(frozen=True)
class MemberReport:
    """Verdict and identity of one engine.

    Attributes:
        pool_prefix: pool prefix that the engine was configured with.
        verdict: ``shared``, ``isolated`` or ``disabled``.
        reason: CamelCase code.
        message: one sentence.
        fingerprint: hex digest of ``manifest``.
        namespace: prefix of the keys that the engine really uses; empty when disabled.
        store_tp: Store TP size in use, normalised; 0 when disabled.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        rank_layouts: physical layouts found on the ranks, without repeats.
        kv_heads: total KV heads of the model, or None when unknown.
        block_tokens: tokens of a block.
        manifest: the canonical fields behind the fingerprint, flattened to text.
        engine: version of the engine.
    """

    pool_prefix: str
    verdict: str
    reason: str
    message: str
    fingerprint: str
    namespace: str
    store_tp: int
    tp: int
    pp: int
    rank_layouts: tuple[str, ...]
    kv_heads: int | None
    block_tokens: int
    manifest: Mapping[str, str] = field(default_factory=dict)
    engine: str = ""


def to_json(report: MemberReport) -> bytes:
    """The body of a report."""
    return json.dumps({"version": VERSION, **asdict(report)}, sort_keys=True).encode()


_TEXT_LIMITS = {
    "pool_prefix": 128, "reason": 64, "message": 1024, "fingerprint": 64, "namespace": 256, "engine": 64,
}  # fmt: skip
_NUMBERS = ("store_tp", "tp", "pp", "block_tokens")


def from_json(body: bytes) -> MemberReport:
    """Read a report that a pod sent.

    Raises:
        LayoutError: with every mistake in it; nothing of a wrong report is used.
    """
    if len(body) > MAX_BYTES:
        raise LayoutError(f"a report of {len(body)} bytes given, at most {MAX_BYTES} expected")
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise LayoutError("the report is not JSON, a JSON object expected") from None
    if not isinstance(data, dict):
        raise LayoutError("the report is not a JSON object")
    if data.get("version") != VERSION:
        raise LayoutError(
            f"report version {data.get('version')!r} given, {VERSION} expected: "
            "bring operator and connector to the same release"
        )
    mistakes: list[str] = []
    values: dict[str, object] = {}
    for name, limit in _TEXT_LIMITS.items():
        text = data.get(name)
        if not isinstance(text, str) or len(text) > limit or not text.isprintable():
            mistakes.append(f"{name}: a printable string of at most {limit} characters expected")
        values[name] = text
    for name in _NUMBERS:
        number = data.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 1 << 20:
            mistakes.append(f"{name}: a whole number from 0 to {1 << 20} expected")
        values[name] = number
    heads = data.get("kv_heads")
    if heads is not None and (isinstance(heads, bool) or not isinstance(heads, int) or not 1 <= heads <= 1 << 20):
        mistakes.append("kv_heads: a whole number of at least 1, or null, expected")
    if data.get("verdict") not in VERDICTS:
        mistakes.append(f"verdict: one of {', '.join(VERDICTS)} expected")
    if isinstance(data.get("reason"), str) and not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", data["reason"]):
        mistakes.append("reason: a CamelCase word expected")
    layouts = data.get("rank_layouts")
    if (
        not isinstance(layouts, list)
        or len(layouts) > 8
        or not all(isinstance(x, str) and len(x) <= 16 for x in layouts)
    ):
        mistakes.append("rank_layouts: at most 8 short strings expected")
        layouts = []
    manifest = data.get("manifest")
    if not isinstance(manifest, dict) or not all(
        isinstance(k, str) and isinstance(v, str) and len(k) <= 128 and len(v) <= 4096 for k, v in manifest.items()
    ):
        mistakes.append("manifest: an object of strings expected")
        manifest = {}
    if mistakes:
        raise LayoutError(mistakes)
    return MemberReport(
        verdict=data["verdict"],
        rank_layouts=tuple(layouts),
        kv_heads=heads,
        manifest=manifest,
        **values,  # type: ignore[arg-type]
    )
