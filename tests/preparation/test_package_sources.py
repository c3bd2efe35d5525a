"""The base image's mirror comes from the machine's own package sources."""

from pathlib import Path

import pytest

from testbed.prepare.debian import mirror, sources
from testbed.prepare.step import UnpreparableError

STANZA = """\
# A comment before it.
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/other
Suites: bookworm
Components: main
Enabled: no
"""


def write(folder: Path, name: str, text: str) -> None:
    """Put a file into an apt folder."""
    (folder / "sources.list.d").mkdir(exist_ok=True)
    (folder / name).write_text(text)


def test_stanza_file_gives_its_enabled_source(tmp_path: Path) -> None:
    """The deb822 format, with comments, continuation lines and a disabled stanza."""
    write(tmp_path, "sources.list.d/debian.sources", STANZA)
    (found,) = sources(tmp_path)
    assert found.suites == ("bookworm", "bookworm-updates")
    assert found.components == ("main", "contrib")
    assert mirror(tmp_path) == "http://mirror.example/debian"


def test_one_line_file_with_options_gives_its_source(tmp_path: Path) -> None:
    """The older format, with options in brackets; sources of other suites are passed over."""
    lines = ("security bookworm-security main", "d bookworm main")
    write(tmp_path, "sources.list", "".join(f"deb [arch=amd64] http://mirror.example/{line}\n" for line in lines))
    assert mirror(tmp_path) == "http://mirror.example/d"


def test_machine_of_another_release_is_told_what_to_add(tmp_path: Path) -> None:
    """No fitting source is an error that names the release."""
    write(tmp_path, "sources.list", "deb http://mirror.example/debian trixie main\n")
    with pytest.raises(UnpreparableError, match="bookworm main"):
        mirror(tmp_path)
