"""The Triton kernels in Triton's interpreter, for tests on a CPU."""

import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def repack() -> Iterator[ModuleType]:
    """The module with its kernel interpreted; the choice is made when it is loaded, and taken back afterwards."""
    module = importlib.import_module("kvshare_connector.kernels.repack")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield importlib.reload(module)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
        importlib.reload(module)
