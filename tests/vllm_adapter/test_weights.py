"""Weights: two sets of weights are told apart cheaply."""

import json
from pathlib import Path

import pytest

from kvshare_connector.scheduler.weights import WeightsUnreadableError, weight_files, weights_digest


def _safetensors(path: Path, body: bytes, **header: object) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def test_equal_files_have_equal_digests_wherever_they_are(tmp_path: Path) -> None:
    """A mount path is not part of a model."""
    digests = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        digests.add(weights_digest([_safetensors(tmp_path / name / "model.safetensors", bytes(range(256)) * 100)]))
    assert len(digests) == 1


def test_every_small_change_counts(tmp_path: Path) -> None:
    """A2: one byte, a header, a size, a name, the order of files."""
    body = bytes(range(256)) * 64
    changed = bytearray(body)
    changed[5000] ^= 1
    folder = tmp_path / "m"
    folder.mkdir()
    files = [
        [_safetensors(folder / "a.safetensors", body)],
        [_safetensors(folder / "b.safetensors", body)],
        [_safetensors(folder / "c.safetensors", bytes(changed))],
        [_safetensors(folder / "d.safetensors", body, x=1)],
        [_safetensors(folder / "e.safetensors", body + b"\0")],
    ]
    same_name: set[str] = set()
    for one in files:
        target = tmp_path / "same" / "model.safetensors"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(one[0].read_bytes())
        same_name.add(weights_digest([target]))
    assert len(same_name) == 4
    assert weights_digest(files[0]) != weights_digest(files[1])


def test_fine_tunes_of_equal_size_differ_wherever_they_differ_at_random(tmp_path: Path) -> None:
    """A2: a sample of 1 MiB spread over all files sees any change that touches most of the bytes."""
    size = 8 << 20
    one = _safetensors(tmp_path / "model.safetensors", b"\1" * size)
    first = weights_digest([one])
    other = bytearray(b"\1" * size)
    other[1::2] = b"\2" * (size // 2)
    _safetensors(one, bytes(other))
    assert weights_digest([one]) != first


def test_safetensors_are_preferred_as_engines_do(tmp_path: Path) -> None:
    """A second copy in another format does not change the digest."""
    tensors = _safetensors(tmp_path / "model.safetensors", b"x" * 100)
    (tmp_path / "pytorch_model.bin").write_bytes(b"other")
    (tmp_path / "config.json").write_text("{}")
    assert weight_files(tmp_path) == [tensors]
    assert [path.name for path in weight_files(tmp_path, pickled=True)] == ["pytorch_model.bin"]
    tensors.unlink()
    assert [path.name for path in weight_files(tmp_path)] == ["pytorch_model.bin"]


@pytest.mark.parametrize("data", [b"", b"\1\2", b"\xff" * 8])
def test_unreadable_weights_are_said_to_be_so(tmp_path: Path, data: bytes) -> None:
    """They isolate an engine; they never stop it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightsUnreadableError):
        weights_digest([path])
    with pytest.raises(WeightsUnreadableError):
        weights_digest([])
    with pytest.raises(WeightsUnreadableError):
        weights_digest([tmp_path / "gone.bin"])


def test_a_fine_tune_of_one_small_tensor_is_seen(tmp_path: Path) -> None:
    """A2: a bias of a few bytes far from every evenly spread sample decides, and so does the middle of a matrix."""
    size, bias = 64 << 20, 64
    offsets = {"a": [0, size // 2 - bias], "bias": [size // 2 - bias, size // 2], "b": [size // 2, size]}
    header = {name: {"dtype": "U8", "shape": [e - s], "data_offsets": [s, e]} for name, (s, e) in offsets.items()}
    path = _safetensors(tmp_path / "model.safetensors", b"", **header)
    start = path.stat().st_size
    digests = set()
    for position in (None, size // 2 - bias + 17, size // 4):
        with path.open("r+b") as file:
            file.truncate(start)
            file.truncate(start + size)
            if position is not None:
                file.seek(start + position)
                file.write(b"\7" * 8)
        digests.add(weights_digest([path]))
    assert len(digests) == 3
