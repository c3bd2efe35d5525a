"""Secrets out of what is handed to others: objects, command lines and log lines. Pure.

Why this exists: an archive for support travels through mail and trackers. What could be a secret is replaced by
``MASKED``, rather too often than too seldom; names, sizes and flags that explain a problem stay. Kubernetes Secrets
are not gathered at all; this is for what people write elsewhere: literal
variables, arguments, addresses with passwords.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

Json = dict[str, Any]
MASKED: Final = "***masked***"

_WORDS: Final = (
    r"(?:(?:api|access|private)[-_.]?key|token(?!s|iz)|passw(?:or)?d|secret|credential|bearer|auth(?![a-z]))"
)
"""What names of secrets contain; `max-num-batched-tokens`, `tokenizer` and `author` are none."""
_NAME: Final = re.compile(_WORDS, re.IGNORECASE)
_FLAG: Final = re.compile(rf"(--[\w.-]*{_WORDS}[\w.-]*)(=|\s+)(\"[^\"]*\"|'[^']*'|[^\s\"']+)", re.IGNORECASE)
_KEYS: Final = re.compile(r"(--api[-_]key)((?:\s+(?!-)(?:\"[^\"]*\"|'[^']*'|[^\s\"'|&;<>]+))+)")
"""vLLM takes several keys behind one `--api-key`."""
_ASSIGNMENT: Final = re.compile(rf"\b(\w*{_WORDS}\w*)=(\"[^\"]*\"|'[^']*'|[^\s\"'$]+)", re.IGNORECASE)
_FIELD: Final = re.compile(
    rf"([\"']\w*{_WORDS}\w*[\"']\s*:\s*)(\"(?:[^\"\\]|\\.)*\"|'[^']*'|\[[^\]]*\])", re.IGNORECASE
)
_KNOWN: Final = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(r"\b(?:hf|sk|ghp|gho|glpat|xox[abp])[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
)
"""Private keys and tokens that are known by their form, wherever they stand."""
_USER_INFO: Final = re.compile(r"(\w+://)[^/\s:@]+:[^/\s@]+@")
_BEARER: Final = re.compile(r"(authorization:?\s*(?:bearer|basic)\s+)\S+", re.IGNORECASE)
_OURS: Final = re.compile(r"kvshare\.dev/|report_token_file")
"""What of ours has a suspicious name and holds no secret: the path of a token, for example."""
_DROPPED_ANNOTATIONS: Final = ("kubectl.kubernetes.io/last-applied-configuration",)


def masked_text(text: str) -> str:
    """Return a text, for example a script or a log line, with everything that could be a secret masked."""
    for pattern in _KNOWN:
        text = pattern.sub(MASKED, text)
    text = _USER_INFO.sub(rf"\1{MASKED}@", text)
    text = _BEARER.sub(rf"\1{MASKED}", text)
    text = _FIELD.sub(lambda match: f'{match[1]}"{MASKED}"', text)
    text = _KEYS.sub(rf"\1 {MASKED}", text)
    text = _FLAG.sub(_unless_ours(lambda match: f"{match[1]}{match[2]}{MASKED}"), text)
    return _ASSIGNMENT.sub(_unless_ours(lambda match: f"{match[1]}={MASKED}"), text)


def _unless_ours(replace: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
    return lambda match: match[0] if _OURS.search(match[0]) or MASKED in match[0] else replace(match)


def masked(thing: Any) -> Any:
    """Return an object without secrets and without what only fills pages (managed fields). It is not changed."""
    if isinstance(thing, dict):
        return _masked_mapping(thing)
    if isinstance(thing, list):
        return _masked_list(thing)
    return masked_text(thing) if isinstance(thing, str) else thing


def _masked_mapping(thing: Json) -> Json:
    out: Json = {}
    for key, value in thing.items():
        if key == "managedFields" or key in _DROPPED_ANNOTATIONS:
            continue
        if thing.get("kind") == "Secret" and key in ("data", "stringData"):
            out[key] = dict.fromkeys(value or {}, MASKED)
        elif isinstance(value, str) and _NAME.search(str(key)) and not _OURS.search(str(key)) and not _harmless(key):
            out[key] = MASKED
        else:
            out[key] = masked(value)
    name = thing.get("name")
    if isinstance(name, str) and isinstance(thing.get("value"), str) and _NAME.search(name):
        out["value"] = MASKED
    return out


def _harmless(key: str) -> bool:
    """Fields of Kubernetes that name a Secret, or say something about tokens, without holding one."""
    return key.endswith(("Name", "Ref")) or key in ("secret", "tokenExpirationSeconds", "automountServiceAccountToken")


def _masked_list(thing: list[Any]) -> list[Any]:
    """A list of words is a command line: the word behind `--hf-token` is its value; `--api-key` takes several."""
    out: list[Any] = []
    option, values = "", 0
    for value in thing:
        if not isinstance(value, str) or value.startswith("--") or (values and value.startswith("-")):
            option, values = (value if isinstance(value, str) else ""), 0
            out.append(masked(value))
            continue
        values += 1
        names_a_secret = option and "=" not in option and _NAME.search(option) and not _OURS.search(option)
        if names_a_secret and (values == 1 or option.replace("_", "-") == "--api-key"):
            out.append(MASKED)
        else:
            out.append(masked(value))
    return out
