"""Reference pages say what the code says."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import yaml

from kvshare_operator.api.member_reasons import MEMBER_REMEDIES
from kvshare_operator.api.pool import read_spec
from kvshare_operator.api.reasons import REASONS

ROOT = Path(__file__).parents[2]


def test_reference_pages_are_what_their_sources_say() -> None:
    """`make generate` writes them."""
    run = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_reason_has_an_anchor() -> None:
    """Links to a reason code work."""
    page = (ROOT / "docs" / "reference" / "reasons.md").read_text()
    assert [code for code in REASONS if f'<a id="{code}"></a>' not in page] == []


def test_every_reason_of_a_member_is_explained_and_has_a_remedy() -> None:
    """Each that an engine can report appears with its state; the remedies are for these and no others."""
    page = (ROOT / "docs" / "reference" / "reasons.md").read_text()
    table = page.partition("## Members that do not share")[2].partition("\nWhat to do")[0]
    found = set(re.findall(r"^\| (?:<a id=\"\w+\"></a>)?`(\w+)` \| (?:isolated|disabled) \|", table, re.MULTILINE))
    assert found == set(MEMBER_REMEDIES)
    assert {
        "ConfigInvalid",
        "HashMismatch",
        "SeveralKinds",
        "MooncakeMissing",
        "HashSeedChanged",
        "InternalError",
    } <= found
    for code in found:
        assert f'<a id="{code}"></a>' in page


def test_every_permission_of_the_chart_is_explained() -> None:
    """As many rows as rules, each with its purpose."""
    rules = (ROOT / "charts" / "kvshare" / "templates" / "operator" / "rbac.yaml").read_text().count("- apiGroups:")
    page = (ROOT / "docs" / "reference" / "permissions.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == rules
    assert all(row.split("|")[5].strip() for row in rows)


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link of README and docs."""
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_examples_of_pools_in_the_docs_are_valid() -> None:
    """People copy them."""
    found = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"```yaml\n(.*?)```", textwrap.dedent(page.read_text()), re.DOTALL):
            pool = yaml.safe_load(block)
            if pool.get("kind") == "KVSharePool":
                read_spec(pool["spec"], unknown_keys="forbid")
                found += 1
    assert found >= 3
