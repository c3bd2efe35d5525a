"""Reference pages say what the code says."""

import subprocess
import sys
from pathlib import Path

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


def test_every_check_of_a_member_is_explained() -> None:
    """Every verdict's reason of the layout package appears, with its state."""
    page = (ROOT / "docs" / "reference" / "reasons.md").read_text()
    for code in (
        "ConfigInvalid",
        "HashMismatch",
        "SeveralKinds",
        "MooncakeMissing",
        "WeightsUnknown",
        "StoreTPInvalid",
    ):
        assert f"`{code}` | " in page
