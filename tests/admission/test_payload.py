"""The payload image's content: pure Python that any supported version can load, small, copied as often as needed."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess

from kvshare_operator.core.quantity import bytes_of
from pods import injected, pod_p0

CONNECTOR = pathlib.Path(__file__).parents[2] / "connector"
PACKAGES = ("kvshare_layout", "kvshare_connector")
OLDEST = (3, 11)


def files() -> list[pathlib.Path]:
    """Everything that the image copies, without caches."""
    found = [path for package in PACKAGES for path in (CONNECTOR / package).rglob("*") if path.is_file()]
    return [path for path in found if "__pycache__" not in path.parts]


def test_payload_is_pure_python_of_the_oldest_supported_version() -> None:
    """B47: no compiled file that another libc, CUDA or Python could refuse; the syntax is the oldest version's."""
    for path in files():
        assert path.suffix in (".py", ".typed"), path
        if path.suffix == ".py":
            ast.parse(path.read_text(encoding="utf-8"), feature_version=OLDEST)


def test_payload_fits_twice_into_its_volume() -> None:
    """B45: the emptyDir's limit holds the files with room; the copy's memory limit is far above a streaming copy."""
    volume = next(one for one in injected(pod_p0()).pod["spec"]["volumes"] if one["name"] == "kvshare-payload")
    blocks = sum(-(-path.stat().st_size // 4096) * 4096 for path in files())
    assert blocks * 2 < bytes_of(volume["emptyDir"]["sizeLimit"])


def test_copy_can_be_repeated(tmp_path: pathlib.Path) -> None:
    """B45: the image's own command, twice into the same folder: a restarted init container finds its files there."""
    text = (CONNECTOR / "Dockerfile").read_text()
    found = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    command = [word.replace("/kvshare/python", str(CONNECTOR)) for word in json.loads(found[1])]
    for _ in range(2):
        subprocess.run([*command, str(tmp_path)], check=True, capture_output=True)
    assert (tmp_path / "kvshare_layout" / "keys.py").read_bytes() == (CONNECTOR / "kvshare_layout/keys.py").read_bytes()
