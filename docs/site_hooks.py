"""What the documentation site needs beyond Markdown; MkDocs loads this file as a hook.

The pages are written to be read in the repository as well: a link to a source file is relative, and becomes a link
to the repository on the site. A page that the navigation does not list joins the section of its folder.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

SECTIONS = {"tutorial": "Tutorial", "howto": "How-to", "explanation": "Explanation", "reference": "Reference"}
MORE = {"benchmarks": "Explanation", "maintainers": "Design", "design": "Design"}
"""Folders that share a section with others."""


def on_config(config: Any) -> Any:
    """Add pages that are not listed to the section of their folder."""
    config["nav"] = complete(config["nav"], Path(config["docs_dir"]))
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links that leave `docs/` into links to the repository."""
    del files
    return outside_links(markdown, page.file.src_uri, config["repo_url"].rstrip("/"))


def complete(nav: list[dict[str, Any]], docs: Path) -> list[dict[str, Any]]:
    """Return the navigation with every page of `docs`; what is listed keeps its place.

    Raises:
        ValueError: for a page in a folder that belongs to no section.
    """
    listed = set(_pages(nav))
    sections = {name: pages for entry in nav for name, pages in entry.items()}
    for path in sorted(docs.rglob("*.md")):
        name = path.relative_to(docs).as_posix()
        if name in listed:
            continue
        folder = name.split("/")[0]
        section = {**SECTIONS, **MORE}.get(folder)
        if section is None:
            raise ValueError(
                f"docs/{name} is in no section: list it in mkdocs.yml or move it below {', '.join(SECTIONS)}"
            )
        sections[section].append(name)
    return nav


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [page for one in inner for page in _pages(one)]


def outside_links(markdown: str, page: str, repository: str) -> str:
    """Return a page's Markdown; `page` is its path below `docs/`."""

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[1]))
        if target == "docs" or target.startswith("docs/"):
            return match[0]
        kind = "tree" if match[1].endswith("/") else "blob"
        return f"]({repository}/{kind}/main/{target})"

    return re.sub(r"\]\((\.\./[^)\s]*)\)", replaced, markdown)
