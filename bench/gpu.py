"""What the Triton kernels do on a GPU: exactness first, then their speed against the device's own copy.

Needs torch, triton, numpy and this repository only: ``python bench/gpu.py`` on any machine with a CUDA device, within
four minutes. ``--interpret`` runs the same code at tiny sizes in Triton's interpreter on a CPU, without any figure.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # as a script nothing is on the path yet
    sys.path[:0] = [str(ROOT / folder) for folder in ("", "connector", "tests")]
    if "--interpret" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"

import torch

from bench.gpu_page import write_page
from bench.rank import Rank, Shape, WrongBytesError, block_hashes, prove
from kvshare_connector.kernels.plain import Plain
from kvshare_connector.store.memory import MemoryStore
from physical import LAYOUTS, caches

#: Bytes of one batch of the measured kernels, much more than a device's caches hold.
BATCH_BYTES = 512 << 20
#: Seconds after which no further shape is begun.
BUDGET_SECONDS = 180.0
REPEATS = 7


@dataclass(frozen=True)
class Speed:
    """One shape's kernels.

    Attributes:
        layout: physical layout.
        layers: L.
        tokens: N.
        heads: heads of an object.
        head_size: elements of K, and of V, of two bytes each.
        objects: objects of the batch.
        gigabytes: bytes of the batch, in 10^9.
        copy: GB/s of the device's own copy of as many bytes.
        pack: GB/s of the pack kernel.
        unpack: GB/s of the unpack kernel.
        call: GB/s of a whole call of pack, the host's part included.
    """

    layout: str
    layers: int
    tokens: int
    heads: int
    head_size: int
    objects: int
    gigabytes: float
    copy: float
    pack: float
    unpack: float
    call: float


def shapes(tiny: bool) -> Iterator[tuple[str, int, int, int, int]]:
    """Layout, layers, tokens, heads, head size: the two layouts of engines over the whole range, then all of them."""
    if tiny:
        yield from (("LBNHC", 2, 4, 2, 6), ("BLHNC", 3, 2, 1, 8))
        return
    for layers in (32, 80):
        for tokens in (16, 32, 64, 128):
            for heads in (1, 2, 4, 8, 16):
                for size in (64, 128, 256):
                    yield from ((layout, layers, tokens, heads, size) for layout in ("LBHNC", "LBNHC"))
    for layout in LAYOUTS:
        yield layout, 32, 16, 8, 128


def exactness(device: torch.device, *, tiny: bool) -> int:
    """Compare the kernels with plain torch, byte for byte and over the whole memory; returns how many comparisons.

    Raises:
        WrongBytesError: any byte differs.
    """
    from kvshare_connector.kernels.repack import Repack

    compared = 0
    sizes = [(2, 3, 2, 3, 6)] if tiny else [(3, 5, 4, 16, 512), (2, 7, 3, 5, 40), (4, 4, 16, 128, 256), (2, 5, 2, 9, 7)]
    for layout in LAYOUTS:
        for layers, blocks, heads, tokens, cell in sizes:
            storage, views = caches(layout, layers, blocks, heads, tokens, cell, pad=3 * cell % 64, device=device)
            storage.random_(0, 256)
            objects = [[(slot, head, 1) for slot in range(layers)] for head in range(heads)]
            fast, plain = Repack(views, objects), Plain(views, objects)
            items = torch.randperm(heads * blocks)
            which, where = items % heads, items // heads
            slots = torch.randperm(len(items))
            got = torch.zeros((len(items), max(fast.sizes) + 5), dtype=torch.uint8, device=device)
            want = torch.zeros_like(got)
            fast.pack(which, where, got, slots)
            plain.pack(which, where, want, slots)
            _same(got, want, f"pack {layout} {sizes}")
            some = len(items) // 2 + 1
            want.random_(0, 256)
            before = storage.clone()
            plain.unpack(which[:some], where[:some], want, slots[:some])
            right = storage.clone()
            storage.copy_(before)
            fast.unpack(which[:some], where[:some], want, slots[:some])
            _same(storage, right, f"unpack {layout} {sizes}")
            compared += 2
    if not tiny and torch.cuda.mem_get_info(device)[0] > 12 << 30:
        far = torch.zeros(5 << 30, dtype=torch.uint8, device=device)
        layer = far.as_strided((3, 1, 2, 256), (2 << 30, 512, 256, 1))
        layer.random_(0, 256)
        rows = torch.zeros((2, 512), dtype=torch.uint8, device=device)
        Repack([layer], [[(0, 0, 1)]]).pack(torch.zeros(2, dtype=torch.int64), torch.tensor([2, 1]), rows)
        _same(rows, layer[[2, 1]].reshape(2, 512), "offsets beyond 2^31")
        compared += 1
    return compared


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if not torch.equal(got, want):
        raise WrongBytesError(f"{what}: {int((got != want).sum())} bytes differ from what plain torch copies")


def executor(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Drive the packed executor: proof over all layouts, then one save and one load of 64 blocks.

    Raises:
        WrongBytesError: a byte differs, or a transfer fails.
    """
    proved = 0
    for layout in LAYOUTS:
        shape = Shape(layout, 2, 12, 4, 4, 16, 2) if tiny else Shape(layout, 32, 96, 8, 16, 512, 4)
        rank = Rank(shape, MemoryStore(assert_registered=True), device, staging_bytes=64 << 20, pack_all=True)
        try:
            prove(rank, seed=proved + 1, count=8)
            proved += 1
            if not tiny and layout == "LBNHC":
                rates = _executor_speed(rank)
        finally:
            rank.close()
    return {"proved": proved} if tiny else {"proved": proved, **rates}


def _executor_speed(rank: Rank) -> dict[str, float]:
    size = 64 * rank.shape.block_bytes
    on_device = torch.empty(size, dtype=torch.uint8, device=rank.device)
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found: dict[str, list[float]] = {"save": [], "load": [], "to_host": [], "to_device": []}
    for number in range(REPEATS):
        hashes = block_hashes((number + 100) << 32, 64)
        for name, work in (
            ("save", lambda h=hashes: rank.save(h, range(64))),
            ("load", lambda h=hashes: rank.load(h, range(64))),
            ("to_host", lambda: (on_host.copy_(on_device), torch.cuda.synchronize())),
            ("to_device", lambda: (on_device.copy_(on_host), torch.cuda.synchronize())),
        ):
            started = time.perf_counter()
            work()
            found[name].append(size / (time.perf_counter() - started) / 1e9)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def speed(shape: tuple[str, int, int, int, int], device: torch.device) -> Speed:
    """Measure one shape: whole caches of this rank, one object a block."""
    from kvshare_connector.kernels.repack import Repack

    layout, layers, tokens, heads, size = shape
    cell = 2 * size * 2
    object_bytes = layers * heads * tokens * cell
    count = max(2, BATCH_BYTES // object_bytes)
    storage, views = caches(layout, layers, count + count // 2 + 1, heads, tokens, cell, device=device)
    kernel = Repack(views, [[(slot, 0, heads) for slot in range(layers)]])
    rows = torch.empty((count, object_bytes), dtype=torch.uint8, device=device)
    other = torch.empty_like(rows)
    which = torch.zeros(count, dtype=torch.int64)
    where = torch.randperm(views[0].shape[0])[:count]
    batch = kernel.prepare(which, where, rows)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(rows),
        "pack": lambda: kernel.launch(batch, unpack=False),
        "unpack": lambda: kernel.launch(batch, unpack=True),
        "call": lambda: kernel.pack(which, where, rows),
    }
    moved = count * object_bytes
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(REPEATS + 1):
        for name in works if number % 2 else reversed(works):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            works[name]()
            end.record()
            end.synchronize()
            if number:
                found[name].append(moved / (start.elapsed_time(end) / 1e3) / 1e9)
    del storage
    rates = {name: statistics.median(values) for name, values in found.items()}
    return Speed(layout, layers, tokens, heads, size, count, moved / 1e9, **rates)


def machine(device: torch.device) -> dict[str, str]:
    """What it ran on."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter"
    return {
        "device": name, "torch": torch.__version__, "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }  # fmt: skip


def main() -> int:
    """Prove, measure, write; 1 when a byte is wrong, 2 when there is no device."""
    parser = argparse.ArgumentParser(prog="python bench/gpu.py", description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="tiny sizes in Triton's interpreter, no figures")
    parser.add_argument("--out", type=Path, help="folder of the JSON file and the page; docs/benchmarks on a GPU")
    given = parser.parse_args()
    started = time.monotonic()
    if not given.interpret and not torch.cuda.is_available():
        print(
            "no CUDA device here, so nothing was measured: run this on a machine with one, or with --interpret for a "
            "smoke run of the same code on a CPU",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if given.interpret else "cuda")
    if given.interpret:
        print("no CUDA device is used: a smoke run in Triton's interpreter, which proves bytes and measures nothing")
    else:
        torch.cuda.set_device(device)
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        compared = exactness(device, tiny=given.interpret)
        print(f"{compared} comparisons with plain torch: every byte equal")
        transfers = executor(device, tiny=given.interpret)
        print(f"packed executor: {transfers['proved']} layouts saved and loaded, every byte equal")
    except WrongBytesError as error:
        print(f"no figures, because the bytes are wrong: {error}", file=sys.stderr)
        return 1
    speeds: list[Speed] = []
    wanted = list(shapes(given.interpret))
    if not given.interpret:
        for shape in wanted:
            if time.monotonic() - started > BUDGET_SECONDS:
                break
            speeds.append(one := speed(shape, device))
            print(
                f"{one.layout} layers {one.layers:>2} block {one.tokens:>3} heads {one.heads:>2} "
                f"size {one.head_size:>3}: copy {one.copy:6.0f} GB/s, pack {one.pack / one.copy:4.0%}, "
                f"unpack {one.unpack / one.copy:4.0%}, "
                f"call {one.call / one.copy:4.0%}",
                flush=True,
            )
    result = {
        "machine": machine(device), "comparisons": compared, "executor": transfers,
        "shapes_wanted": len(wanted), "shapes": [asdict(one) for one in speeds],
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    out = given.out or (None if given.interpret else ROOT / "docs" / "benchmarks")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "gpu.md").write_text(write_page(result))
        print(f"written: {out / 'gpu.json'}, {out / 'gpu.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
