"""Fixtures of the connector's tests; importing vLLM takes seconds and happens only where a test needs it."""

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from played_engine import Engine, World
    from played_model import Shape


@pytest.fixture(scope="session")
def played() -> ModuleType:
    """The module ``played_engine``. Its import loads vLLM and torch's compiler, whose own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import played_engine
    return played_engine


@pytest.fixture(scope="session")
def vllm_configs(played: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[["Shape"], Any]:
    """vLLM's configuration by shape, each made once."""
    assert played
    made: dict[Any, Any] = {}

    def make(shape: "Shape") -> Any:
        from played_model import vllm_config

        if shape not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[shape] = vllm_config(tmp_path_factory.mktemp("model"), shape)
        return made[shape]

    return make


@pytest.fixture
def new_world(monkeypatch: pytest.MonkeyPatch, vllm_configs: Callable[["Shape"], Any]) -> Callable[..., "World"]:
    """Make worlds whose engines use stores in memory instead of Mooncake."""
    from kvshare_connector.scheduler import glue, probe
    from kvshare_connector.store import installation, mooncake
    from kvshare_connector.worker import loading
    from played_engine import World, open_newest
    from played_model import Shape

    monkeypatch.setattr(mooncake.MooncakeStore, "open", open_newest)
    monkeypatch.setattr(installation, "library_problem", lambda: "")
    # A machine that stands still for seconds must not look like a store that hangs: an engine that stops stepping
    # leaves pins; facts that come late, a lookup or a load that is given up are misses. Tests of these limits set
    # their own.
    limits = {
        glue: ("NEWS_SECONDS", "FACTS_SECONDS", "REUSE_SECONDS"),
        probe: ("HANGS_SECONDS",),
        loading: ("TURN_SECONDS",),
    }
    for module, names in limits.items():
        for name in names:
            monkeypatch.setattr(module, name, 50.0)

    def make(shape: "Shape | None" = None) -> "World":
        shape = shape or Shape()
        return World(vllm_configs(shape), shape)

    return make


@pytest.fixture
def world(new_world: Callable[..., "World"]) -> "World":
    """A world with the default shape."""
    return new_world()


@pytest.fixture
def engines() -> Iterator[Callable[..., "Engine"]]:
    """Make engines that end with the test."""
    from played_engine import Engine

    made: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def other(played: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The other connector's class; what a test sets on it ends with the test."""
    assert played
    from other_connector import OtherConnector

    monkeypatch.setattr(OtherConnector, "hits", {})
    monkeypatch.setattr(OtherConnector, "finishing", True)
    monkeypatch.setattr(OtherConnector, "synchronous", False)
    return OtherConnector
