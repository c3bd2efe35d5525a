"""The documentation site: built without a warning, complete, and readable in the repository too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def _hooks() -> object:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = _hooks()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of MkDocs (a dead link, a page in no section) fails it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    """Each Markdown file became a page, and nothing else of `docs/` did."""
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")} - {Path("404")}
    assert built == pages
    assert not list(site.rglob("*.py"))


def test_the_site_asks_no_other_server_for_anything(site: Path) -> None:
    """It works inside a closed network: no fonts, scripts or styles from elsewhere."""
    page = (site / "index.html").read_text()
    assert "fonts.googleapis" not in page
    assert 'src="http' not in page
    assert 'rel="stylesheet" href="http' not in page


def test_links_to_source_files_lead_to_the_repository() -> None:
    """They are relative in the repository; on the site they cannot be."""
    text = "[a](../../operator/x.py) [b](../reference/c.md) [d](../../charts/kvshare/) [e](https://x.test/../y)"
    assert HOOKS.outside_links(text, "howto/page.md", "https://r.test/k") == (  # type: ignore[attr-defined]
        "[a](https://r.test/k/blob/main/operator/x.py) [b](../reference/c.md)"
        " [d](https://r.test/k/tree/main/charts/kvshare) [e](https://x.test/../y)"
    )


def test_a_page_outside_all_sections_is_named(tmp_path: Path) -> None:
    """It would be on the site without a way to it."""
    (tmp_path / "lost.md").write_text("# Lost\n")
    nav: list[dict[str, list[str]]] = [
        {name: []} for name in ("Tutorial", "How-to", "Explanation", "Reference", "Design")
    ]
    with pytest.raises(ValueError, match=r"docs/lost\.md is in no section"):
        HOOKS.complete(nav, tmp_path)  # type: ignore[attr-defined]


def test_the_navigation_has_the_five_kinds_of_pages() -> None:
    """Learning, doing, understanding, looking up, and why it was decided so."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [next(iter(entry)) for entry in nav] == [
        "KVShare",
        "Tutorial",
        "How-to",
        "Explanation",
        "Reference",
        "Design",
    ]
