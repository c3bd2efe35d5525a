"""How pip is called, whatever the calling process has imported."""

import os
import subprocess
import sys
from pathlib import Path

from testbed import places


def test_pip_is_looked_for_without_asking_what_setuptools_pretends() -> None:
    """In a process that has loaded distutils, setuptools answers for pip with a warning; preparing goes on."""
    code = "import distutils; from testbed.prepare.python_environment import pip_command; print(pip_command()[0])"
    asked = [sys.executable, "-W", "error::UserWarning", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(places.REPOSITORY / "tests")}
    said = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert Path(said.stdout.strip()).is_file()
