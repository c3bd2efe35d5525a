"""The start of the cluster's own programs."""

from pathlib import Path

from testbed.control_plane import _written

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def test_a_certificate_that_is_being_written_is_not_taken_for_one(tmp_path: Path) -> None:
    """An API server creates the file first and fills it then."""
    file = tmp_path / "apiserver.crt"
    assert not _written(file)
    for size in range(len(CERTIFICATE) - 1):
        file.write_text(CERTIFICATE[:size])
        assert not _written(file)
    file.write_text(CERTIFICATE)
    assert _written(file)
    file.write_text(CERTIFICATE * 2)
    assert _written(file)
