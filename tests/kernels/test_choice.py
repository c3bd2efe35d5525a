"""Which kernels a rank gets: the fast ones only where they are wanted, work and are right."""

import logging
import sys
from types import ModuleType

import pytest
import torch

from kvshare_connector.kernels import choice
from kvshare_connector.kernels.plain import Plain
from physical import caches, label

OBJECTS = [[(0, 0, 1), (1, 0, 1)], [(0, 1, 1), (1, 1, 1)]]


@pytest.fixture
def views() -> list[torch.Tensor]:
    """Two layers, full of labels."""
    made = caches("LBNHC", 2, 3, 2, 4, 8)[1]
    for layer, view in enumerate(made):
        view.copy_(label(layer, 3, 2, 4, 8))
    return made


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches count as those of an accelerator."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_a_cpu_gets_plain_torch_and_never_loads_triton(
    views: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU image may lack it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvshare_connector.kernels.repack", raising=False)
    assert isinstance(choice.kernels_for(views, OBJECTS), Plain)


def test_an_accelerator_gets_triton_tried_on_one_block(
    views: list[torch.Tensor], accelerator: None, repack: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Packed, compared and written back: afterwards everything is as it was."""
    before = [view.clone() for view in views]
    assert isinstance(choice.kernels_for(views, OBJECTS), repack.Repack)
    assert all(torch.equal(view, was) for view, was in zip(views, before, strict=True))
    assert caplog.records == []


def test_a_rank_without_objects_gets_plain_torch(accelerator: None) -> None:
    """A pipeline stage without caches has nothing to try."""
    assert isinstance(choice.kernels_for([], []), Plain)


@pytest.mark.parametrize("fault", ["import", "construction", "compilation", "wrong bytes"])
def test_trouble_with_triton_costs_speed_and_one_line(
    views: list[torch.Tensor], accelerator: None, repack: ModuleType, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, fault: str,
) -> None:  # fmt: skip
    """Whatever fails, the engine caches on, and the log says once why it is slower."""
    match fault:
        case "import":
            monkeypatch.setitem(sys.modules, "triton", None)
            monkeypatch.delitem(sys.modules, "kvshare_connector.kernels.repack")
        case "construction":
            views[1] = views[1][:, :, :, :4]
        case "compilation":
            monkeypatch.setattr(repack.Repack, "pack", _fail)
        case "wrong bytes":
            monkeypatch.setattr(repack.Repack, "pack", lambda self, objects, blocks, rows: rows.fill_(1))
    with caplog.at_level(logging.WARNING):
        assert isinstance(choice.kernels_for(views, OBJECTS), Plain)
    (record,) = caplog.records
    assert "Triton cannot be used" in record.getMessage()
    assert "\n" not in record.getMessage()


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("ptxas died\nof a long report")
