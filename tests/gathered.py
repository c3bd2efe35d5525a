"""`kvshare must-gather` as people run it: as a process with a kubeconfig; what its archive holds."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path


def gathered(kubeconfig: Path, target: Path, *words: str) -> dict[str, str]:
    """Run it, and read the archive: texts by their path inside of it."""
    code = "from kvshare_operator.cli.main import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "must-gather", "-o", str(target), *words],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    with tarfile.open(target) as archive:
        found = {name.partition("/")[2]: archive.extractfile(name) for name in archive.getnames()}
        return {name: file.read().decode() for name, file in found.items() if file is not None}
