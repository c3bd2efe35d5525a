"""Stores under test: the one in memory, and a real Mooncake on loopback that the whole folder shares."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from kvshare_connector.store.memory import MemoryStore
from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.protocol import ObjectStore
from kvshare_connector.store.settings import StoreSettings
from testbed import mooncake

_numbers = itertools.count()


@pytest.fixture(scope="session")
def running_mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mooncake.Store]:
    """A master with one node that nobody disturbs."""
    with mooncake.store(tmp_path_factory.mktemp("mooncake"), segment="256mb") as running:
        yield running


@pytest.fixture(params=["memory", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def open_store(request: pytest.FixtureRequest) -> Iterator[Callable[[], ObjectStore]]:
    """Open clients of one store; they are closed after the test."""
    opened: list[ObjectStore] = []
    first = MemoryStore()

    def make() -> ObjectStore:
        if request.param == "memory":
            client: ObjectStore = first.another_client()
        else:
            running = request.getfixturevalue("running_mooncake")
            client = MooncakeStore.open(StoreSettings(running.address))
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()


@pytest.fixture
def store(open_store: Callable[[], ObjectStore]) -> ObjectStore:
    """One client of the store under test."""
    return open_store()


@pytest.fixture
def key() -> Callable[[str], str]:
    """Names that no other test uses: the real store is shared."""
    number = next(_numbers)
    return lambda name: f"kvs1/p-test/g1/f-{number:032x}/{name}"
