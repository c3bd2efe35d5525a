"""The GPU benchmark where there is no GPU: the same code at tiny sizes, and no figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_page import write_page

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
#: Runs it with vLLM, Mooncake and the test bed's own packages out of reach, and what the test adds.
START = """
import runpy, sys
for name in ("vllm", "mooncake", "testbed", "httpx", "hypothesis", "pytest"):
    sys.modules[name] = None
sys.argv = ["gpu.py", *sys.argv[1:]]
"""
RUN = "runpy.run_path({path!r}, run_name='__main__')\n"
#: A kernel that drops what it was asked to write.
WRONG = """
import os
os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [{connector!r}]
from kvshare_connector.kernels.repack import Repack
Repack.{method} = lambda *args, **kwargs: None
"""


def _run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = START + before + RUN.format(path=str(ROOT / "bench" / "gpu.py"))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd="/")


def test_a_smoke_run_proves_bytes_and_shows_no_figure(tmp_path: Path) -> None:
    """With torch, triton, numpy and the repository alone; it says that no device was used."""
    run = _run("--interpret", "--out", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert "no CUDA device is used" in run.stdout
    assert "12 comparisons with plain torch: every byte equal" in run.stdout
    assert "6 layouts saved and loaded, every byte equal" in run.stdout
    assert "GB/s" not in run.stdout
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["shapes"] == []
    assert (tmp_path / "gpu.md").read_text() == write_page(result)
    assert "there are no figures" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize("method", ["pack", "unpack"])
def test_wrong_bytes_end_it_before_any_figure(tmp_path: Path, method: str) -> None:
    """Nothing is written."""
    wrong = WRONG.format(connector=str(ROOT / "connector"), method=method)
    run = _run("--interpret", "--out", str(tmp_path), before=wrong)
    assert run.returncode == 1
    assert "no figures, because the bytes are wrong" in run.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_device_it_says_what_to_do() -> None:
    """Nothing is measured and nothing is claimed."""
    run = _run()
    assert (run.returncode, run.stdout) == (2, "")
    assert "no CUDA device here" in run.stderr
    assert "--interpret" in run.stderr


def test_the_page_says_how_many_shapes_reach_the_aim() -> None:
    """From the figures of the run alone."""
    shape = {
        "layout": "LBNHC", "layers": 1, "tokens": 16, "heads": 8, "head_size": 128, "objects": 4,
        "gigabytes": 0.5, "copy": 2000.0, "pack": 1900.0, "unpack": 1700.0, "call": 1500.0,
    }  # fmt: skip
    page = write_page({
        "machine": {"device": "a device", "torch": "2", "triton": "3", "date": "2026-11-30"}, "seconds": 3.0,
        "comparisons": 49, "shapes_wanted": 2, "shapes": [shape],
        "executor": {"proved": 6, "save": 5.0, "load": 6.0, "to_host": 20.0, "to_device": 21.0},
    })  # fmt: skip
    assert "| LBNHC | 1 | 16 | 8 | 128 | 2000 | 95% | 85% | 75% |" in page
    assert "Pack: median 95%, least 95%, 1 of 1 shapes at 90 % or more." in page
    assert "Unpack: median 85%, least 85%, 0 of 1 shapes at 90 % or more." in page
