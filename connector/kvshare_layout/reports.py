"""Reports: what a member tells the operator about itself, and how the operator reads it without trusting it.

Pure conversion between a frozen object and JSON. The body is what an engine's scheduler process posts to
``/v1/report`` once after start-up and after every change of its verdict.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from kvshare_layout.errors import LayoutError

#: Version of the body; another version is refused with a clear answer.
VERSION = 1
#: Largest body that is read, bytes.
MAX_BYTES = 64 * 1024
#: From the best to the worst.
VERDICTS = ("shared", "isolated", "disabled")
#: Largest number of an engine in its pod.
MAX_ENGINE_INDEX = 63


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
        engine_index: number of the engine among the data-parallel engines of its pod.
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
    engine_index: int = 0


_TEXT_LIMITS = {
    "pool_prefix": 128, "reason": 64, "message": 1024, "fingerprint": 64, "namespace": 256, "engine": 64,
}  # fmt: skip
_NUMBERS = ("store_tp", "tp", "pp", "block_tokens")
_MOST_LAYOUTS, _LAYOUT_LIMIT, _FIELD_LIMIT, _VALUE_LIMIT = 8, 16, 128, 4096


def worst(reports: Iterable[MemberReport]) -> MemberReport | None:
    """The report that speaks for a pod: of its engine with the worst verdict, the first of several, or None."""
    return max(reports, key=lambda one: (VERDICTS.index(one.verdict), -one.engine_index), default=None)


def to_json(report: MemberReport) -> bytes:
    """The body of a report, always one that ``from_json`` reads: texts that are too long are cut.

    A message of many mistakes must reach people shortened rather than not at all.
    """
    data = asdict(report)
    for name, limit in _TEXT_LIMITS.items():
        data[name] = _clip(data[name], limit)
    data["rank_layouts"] = [_clip(text, _LAYOUT_LIMIT) for text in report.rank_layouts[:_MOST_LAYOUTS]]
    manifest = {_clip(k, _FIELD_LIMIT): _clip(v, _VALUE_LIMIT) for k, v in report.manifest.items()}
    body = _dump(data, manifest)
    fields = [(k, _clip(v, 64)) for k, v in sorted(manifest.items())]
    while len(body) > MAX_BYTES:
        body, fields = _dump(data, dict(fields)), fields[: len(fields) // 2]
    return body


def _dump(data: Mapping[str, object], manifest: Mapping[str, str]) -> bytes:
    return json.dumps({"version": VERSION, **data, "manifest": manifest}, sort_keys=True).encode()


def _clip(text: str, limit: int) -> str:
    printable = "".join(c if c.isprintable() else "?" for c in text)
    return printable if len(printable) <= limit else printable[: limit - 3] + "..."


def _is_text(value: object, limit: int) -> bool:
    return isinstance(value, str) and len(value) <= limit and value.isprintable()


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
    if isinstance(data.get("version"), bool) or data.get("version") != VERSION:
        raise LayoutError(
            f"report version {data.get('version')!r} given, {VERSION} expected: "
            "bring operator and connector to the same release"
        )
    mistakes: list[str] = []
    values: dict[str, object] = {}
    for name, limit in _TEXT_LIMITS.items():
        text = data.get(name)
        if not _is_text(text, limit):
            mistakes.append(f"{name}: a printable string of at most {limit} characters expected")
        values[name] = text
    for name in _NUMBERS:
        number = data.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 1 << 20:
            mistakes.append(f"{name}: a whole number from 0 to {1 << 20} expected")
        values[name] = number
    index = data.get("engine_index", 0)  # members of the first release had one engine
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index <= MAX_ENGINE_INDEX:
        mistakes.append(f"engine_index: a whole number from 0 to {MAX_ENGINE_INDEX} expected")
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
        or len(layouts) > _MOST_LAYOUTS
        or not all(_is_text(x, _LAYOUT_LIMIT) for x in layouts)
    ):
        mistakes.append("rank_layouts: at most 8 short strings expected")
        layouts = []
    manifest = data.get("manifest")
    if not isinstance(manifest, dict) or not all(
        _is_text(k, _FIELD_LIMIT) and _is_text(v, _VALUE_LIMIT) for k, v in manifest.items()
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
        engine_index=index,
        **values,  # type: ignore[arg-type]
    )
