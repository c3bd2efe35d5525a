"""People's manifests: read with comments and order, changed in place, written again as they were.

Why this exists: `kvshare inject -o yaml` must give back the user's file with our additions and nothing else.
Documents that do not change keep their exact text. Others go through ruamel.yaml; what could not be kept
(anchors that stand for several places) is written out, and said.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import itertools
import json
import pathlib
import re
import sys
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.anchor import Anchor
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from kvshare_operator.cli.yaml_comments import keep_last, take_trailing

Json = dict[str, Any]
_MOST_VALUES: Final = 1_000_000
_MARK: Final = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_END: Final = re.compile(r"^\.\.\.[^\S\n]*(?:#[^\n]*)?(?:\n|\Z)", re.MULTILINE)
_BOOLEAN: Final = re.compile("y|yes|n|no|on|off", re.IGNORECASE)
"""Words that are booleans in YAML 1.1, which Kubernetes reads, and text in YAML 1.2, which is written."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One YAML document of a file.

    Attributes:
        source: the file's name, `-` for standard input.
        text: its exact text, without the mark before it.
        content: plain values; None for one that holds comments only.
        newline: how the file's lines end; ``text`` has plain newlines in any case.
    """

    source: str
    text: str
    content: Any
    newline: str = "\n"


def read_source(path: str) -> tuple[list[Document], list[str]]:
    """Read a file (`-` is standard input). Return its documents, and every mistake as a sentence."""
    try:
        raw = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return [], [f"{path} cannot be read: {reason}"]
    newline = "\r\n" if "\r\n" in text else "\n"
    text = text.replace("\r\n", "\n")
    documents, mistakes, line = [], [], 1
    for part in split(text):
        try:
            documents.append(Document(path, part, plain(_yaml(part).load(part)), newline))
        except (YAMLError, ValueError) as error:
            why = " ".join(str(getattr(error, "problem", None) or error).split())
            mark = getattr(error, "problem_mark", None)
            where = f"{path}, line {line + mark.line}" if mark else f"{path}, document at line {line}"
            hint = "; render templates first (helm template, kustomize build)" if "{{" in part else ""
            mistakes.append(f"{where} is not YAML: {why}{hint}")
        line += part.count("\n")
    return documents, mistakes


def split(text: str) -> list[str]:
    """Cut a file into documents; marks and directives stay with the document they belong to, nothing is lost."""
    ends = [match.end() for match in _END.finditer(text)]
    cuts = sorted({0, len(text), *(match.start() for match in _MARK.finditer(text)), *ends})
    parts: list[str] = []
    pending = ""
    for start, end in itertools.pairwise(cuts):
        part = pending + text[start:end]
        lines = [line for line in part.splitlines() if line.strip() and not line.startswith("#")]
        pending = part if lines and all(line.startswith("%") for line in lines) else ""
        if not pending:
            parts.append(part)
    return [*parts, pending] if pending else parts


def plain(node: Any) -> Any:
    """Return the same values as plain Python, without comments and styles; dates become text, as in Kubernetes.

    Raises ValueError for aliases that stand for more than a million values together.
    """
    left = _MOST_VALUES

    def copied(value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"its aliases stand for more than {_MOST_VALUES} values")
        if isinstance(value, dict):
            return {str(key): copied(one) for key, one in value.items()}
        if isinstance(value, list):
            return [copied(one) for one in value]
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float, str):
            if isinstance(value, kind):
                return kind(value)
        return str(value)

    return copied(node)


def normalised(document: Document) -> str:
    """Return the text of a document as it would be written without any change."""
    if (spaces := _json_indent(document.text)) is not None:
        return json.dumps(document.content, indent=spaces or None, ensure_ascii=False) + "\n"
    return _dump(document, _yaml(document.text).load(document.text))


def changed(document: Document, operations: list[Json], expected: Any) -> tuple[str, bool]:
    """Apply a patch. Return the new text, and whether comments were kept.

    ``expected`` is the document's content after the patch; the text is read again and compared with it.
    """
    if (spaces := _json_indent(document.text)) is not None:
        return json.dumps(expected, indent=spaces or None, ensure_ascii=False) + "\n", True
    tree = _yaml(document.text).load(document.text)
    for operation in operations:
        _apply(tree, operation)
    text = _dump(document, tree)
    if plain(_yaml(text).load(text)) == expected:
        return text, True
    tree = _apart(_yaml(document.text).load(document.text))
    for operation in operations:
        _apply(tree, operation)
    return _dump(document, tree), False


def _apart(node: Any) -> Any:
    """Return a tree in which nothing stands for several places, with every scalar as it was written.

    Quotes and leading zeros matter: parsers of YAML 1.1, such as kubectl's, read `yes` and `0400` as something else.
    """
    if isinstance(node, dict):
        return {key: _apart(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_apart(value) for value in node]
    scalar = copy.copy(node)
    if hasattr(scalar, Anchor.attrib):
        delattr(scalar, Anchor.attrib)
    return scalar


def _json_indent(text: str) -> int | None:
    """Return by how many spaces a JSON document indents (0: one line); None for YAML that is no JSON."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        json.loads(text)
    except ValueError:
        return None
    found = re.search(r"^( +)\S", text, re.MULTILINE)
    return len(found[1]) if found else 0


def _yaml(text: str) -> YAML:
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 1_000_000
    mapping, offset = indentation(text)
    yaml.indent(mapping=mapping, sequence=offset + 2, offset=offset)
    yaml.explicit_start = bool(_MARK.search(text))
    return yaml


def _dump(document: Document, tree: Any) -> str:
    out = io.StringIO()
    _yaml(document.text).dump(tree, out)
    return out.getvalue() + ("...\n" if _END.search(document.text) else "")


def indentation(text: str) -> tuple[int, int]:
    """Return how a text indents: spaces of a mapping in a mapping, and of a dash under its key."""
    mappings: collections.Counter[int] = collections.Counter()
    dashes: collections.Counter[int] = collections.Counter()
    before: int | None = None
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(("#", "---", "%")):
            continue
        indent = len(line) - len(line.lstrip())
        if before is not None:
            if bare.startswith("- ") and indent >= before:
                dashes[indent - before] += 1
            elif not bare.startswith("-") and indent > before:
                mappings[indent - before] += 1
        while bare.startswith("- "):
            inner = bare[2:].lstrip()
            indent, bare = indent + len(bare) - len(inner), inner
        before = indent if re.search(r":\s*(#.*)?$", bare) else None
    most = mappings.most_common(1)
    dash = dashes.most_common(1)
    return (most[0][0] if most else 2), (dash[0][0] if dash else 0)


def _styled(value: Any) -> Any:
    if isinstance(value, str) and "\n" in value:
        return LiteralScalarString(value)
    if isinstance(value, str) and _BOOLEAN.fullmatch(value):
        return DoubleQuotedScalarString(value)
    if isinstance(value, dict):
        return CommentedMap((key, _styled(one)) for key, one in value.items())
    return CommentedSeq(_styled(one) for one in value) if isinstance(value, list) else value


def _apply(tree: Any, operation: Json) -> None:
    """Apply one `add` or `replace` of a JSON patch to a tree, in place."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    node = tree
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    value = _styled(operation["value"])
    trailing = take_trailing(node)
    if isinstance(node, list):
        if last == "-":
            node.append(value)
        else:
            node[int(last)] = value
    else:
        node[last] = value
    keep_last(node, trailing)
