"""Where things are: the checkout, the cache, and what preparation puts into them.

Standard library only. Nothing here creates a folder or reads a file.
"""

import os
from pathlib import Path

TESTBED = Path(__file__).resolve().parent
REPOSITORY = TESTBED.parents[1]
GO_MODULES = TESTBED / "go"
PYTHON_LISTS = TESTBED / "python"
IMAGE_SOURCES = TESTBED / "images"

CACHE = Path(os.environ.get("KVSHARE_CACHE", Path.home() / ".cache" / "kvshare"))
"""Everything that preparation keeps between runs; deleting it is always safe."""

PROGRAMS = CACHE / "bin"
IMAGES = CACHE / "images"
MODELS = CACHE / "models"
PREPARE_LOGS = CACHE / "logs" / "prepare"

ENVIRONMENT = REPOSITORY / ".venv"
BUILD = REPOSITORY / "build"

DEMO_STATE = CACHE / "cluster" / "demo"
"""State of the demo's cluster: one for all checkouts, because the machine can run only one."""


def environment_python() -> Path:
    """The Python of the checkout's environment."""
    return ENVIRONMENT / "bin" / "python"


def site_packages() -> Path:
    """The environment's packages: what vLLM pods mount."""
    return ENVIRONMENT / "lib" / "python3.11" / "site-packages"
