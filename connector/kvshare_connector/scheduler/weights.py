"""Weights: a digest that tells two sets of weights apart, cheaply enough for every start of an engine.

Reads files, knows no engine. Names, shapes and sizes of two fine-tunes are equal, so the digest covers a fixed sample
of the bytes themselves: about 1 MiB, spread evenly over all files, besides every safetensors header. And because a
fine-tune may touch a few tensors only (norms, biases, scales, one projection), every tensor is looked at: small ones
as a whole, large ones in the middle.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

#: Files that hold weights, by suffix.
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
#: Number and size of the samples.
SAMPLES, SAMPLE_BYTES = 256, 4096
#: Tensors up to this size enter as a whole, of larger ones this much from the middle; of very many, evenly chosen ones.
TENSOR_BYTES, MOST_TENSORS = 1024, 4096
#: A safetensors header larger than this is not one.
MAX_HEADER = 100 << 20


class WeightsUnreadableError(Exception):
    """No digest can be made; the text says why."""


def weight_files(directory: Path, *, pickled: bool = False) -> list[Path]:
    """The files with weights in a model directory; safetensors alone when there are any, as engines prefer them.

    Args:
        directory: of the model.
        pickled: the engine was told to read other files than safetensors.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if pickled:
        return [path for path in files if path.suffix != ".safetensors"]
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
                    header = _header(file.read(8), file.read, path)
                    digest.update(header)
                    for start, length in _tensor_samples(header):
                        file.seek(start)
                        digest.update(file.read(length))
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


def _tensor_samples(header: bytes) -> list[tuple[int, int]]:
    """Where to look at the tensors that a safetensors header lists: (position in the file, bytes), ascending."""
    try:
        entries = json.loads(header)
        ranges = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    step = -(-len(ranges) // MOST_TENSORS) if ranges else 1
    samples = []
    for start, end in ranges[::step]:
        length = min(end - start, TENSOR_BYTES)
        samples.append((8 + len(header) + start + (end - start - length) // 2, length))
    return samples
