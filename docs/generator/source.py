"""Reads what the pages need from source text that cannot be imported here, or that imports would hide."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tree(path: str) -> ast.Module:
    """The syntax tree of a file of the repository."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def text_of(node: ast.AST) -> str | None:
    """A text literal as people should read it: what is filled in later stands as ``<name>``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                last = ast.unparse(value.value).split(".")[-1]
                parts.append(f"<{last}>" if last.isidentifier() and "__" not in last else "<...>")
            else:
                parts.append(text_of(value) or "")
        return "".join(parts)
    return None


def assigned(module: ast.Module, name: str) -> ast.expr:
    """The value of a module's constant."""
    for node in module.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(one, ast.Name) and one.id == name for one in targets) and node.value is not None:
            return node.value
    raise KeyError(name)


def constants_with_docstrings(path: str) -> Iterator[tuple[str, str, str, str]]:
    """(section, name, value, docstring) of a module's text constants; sections are ``# -- title ---`` comments."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    body = tree(path).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        described = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            described = " ".join(str(following.value.value).split())
        section = next((line.strip("# -") for line in reversed(lines[: node.lineno]) if line.startswith("# -- ")), "")
        yield section, node.target.id, text_of(node.value) if node.value else "", described  # type: ignore[misc]


def cell(text: str) -> str:
    """A text for a table cell."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
