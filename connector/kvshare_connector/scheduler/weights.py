"""Weights: a digest that tells two sets of weights apart, cheaply enough for every start of an engine.

Reads files, knows no engine. Names, shapes and sizes of two fine-tunes are equal, so the digest covers a fixed sample
of the bytes themselves: about 1 MiB, spread evenly over all files, besides every safetensors header.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

#: Files that hold weights, by suffix.
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
#: Number and size of the samples.
SAMPLES, SAMPLE_BYTES = 256, 4096
#: A safetensors header larger than this is not one.
MAX_HEADER = 100 << 20


class WeightsUnreadableError(Exception):
    """No digest can be made; the text says why."""


def weight_files(directory: Path) -> list[Path]:
    """The files with weights in a model directory; safetensors alone when there are any, as engines prefer them."""
    files = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
    return [path for path in files if path.suffix == ".safetensors"] or files


def weights_digest(files: Sequence[Path]) -> str:
    """Hex SHA-256 over names, sizes, safetensors headers and the sample.

    Raises:
        WeightsUnreadableError: no files, or one cannot be read.
    """
    if not files:
        raise WeightsUnreadableError("no weight files found, a directory with safetensors expected")
    digest = hashlib.sha256()
    try:
        sizes = [path.stat().st_size for path in files]
        step = max(SAMPLE_BYTES, sum(sizes) // SAMPLES)
        position = 0  # of the next sample, counted through all files
        offset = 0  # of the current file
        for path, size in zip(files, sizes, strict=True):
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as file:
                if path.suffix == ".safetensors":
                    digest.update(_header(file.read(8), file.read, path))
                while position < offset + size:
                    file.seek(position - offset)
                    digest.update(file.read(SAMPLE_BYTES))
                    position += step
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES))
            offset += size
    except OSError as error:
        raise WeightsUnreadableError(f"the weights cannot be read: {error}") from error
    return digest.hexdigest()


def _header(prefix: bytes, read: Callable[[int], bytes], path: Path) -> bytes:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER:
        raise WeightsUnreadableError(f"{path.name} is no safetensors file")
    return read(length)
