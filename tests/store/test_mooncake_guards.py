"""What never reaches Mooncake's client, and what is done about its answers. Uses a hand-made library in its place."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvshare_connector.store import codes, installation, mooncake
from kvshare_connector.store.mooncake import MooncakeStore
from kvshare_connector.store.protocol import StoreSetupError, StoreUnavailable
from kvshare_connector.store.settings import StoreSettings


class Client:
    """A client that answers what a test wants, and fails the test when it is used before setup or after close."""

    def __init__(self, library: "Library") -> None:
        self.library = library
        self.state = "new"
        self.ranges: list[tuple[int, int]] = []
        library.clients.append(self)

    def setup(self, *arguments: object, **named: object) -> int:
        """Record the arguments."""
        self.library.setups.append((arguments, named))
        if self.library.setup_gate:
            self.library.setup_gate.wait()
        if self.library.setup_code == 0:
            self.state = "open"
        return self.library.setup_code

    def close(self) -> int:
        """Record the order."""
        self.library.closed.append(self)
        self.state = "closed"
        return 0

    def _call(self, name: str, *arguments: Any) -> Any:
        assert self.state == "open", f"{name} on a {self.state} client ends the process"
        self.library.calls.append((name, arguments))
        return self.library.answer(self, name, *arguments)

    def register_buffer(self, address: int, size: int) -> Any:
        """Record the range."""
        self.ranges.append((address, size))
        return self._call("register_buffer", address, size)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._call(name, *arguments)


class Library:
    """In the place of the module ``mooncake.store``."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.closed: list[Client] = []
        self.setups: list[tuple[tuple[object, ...], dict[str, object]]] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.setup_code = 0
        self.setup_gate: threading.Event | None = None
        self.answers: dict[str, Callable[..., Any]] = {}

    def MooncakeDistributedStore(self) -> Client:
        """A new client."""
        return Client(self)

    def ReplicateConfig(self) -> SimpleNamespace:
        """A configuration of a put."""
        return SimpleNamespace(group_ids=None)

    def answer(self, client: Client, name: str, *arguments: Any) -> Any:
        """What the test wants, or success."""
        if name in self.answers:
            return self.answers[name](client, *arguments)
        if name == "batch_get_into_multi_buffers":
            return [sum(sizes) for sizes in arguments[2]]
        if name == "batch_is_exist":
            return [1] * len(arguments[0])
        return [0] * len(arguments[0]) if name.startswith("batch") else 0

    def made(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of the calls of one method."""
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library that works, and an environment that is restored."""
    made = Library()
    monkeypatch.setattr(mooncake, "library", lambda: made)
    monkeypatch.setattr(mooncake, "set_environment", lambda settings: None)
    monkeypatch.setattr(installation, "reachable", lambda master, seconds: True)
    return made


@pytest.fixture
def store(library: Library) -> Iterator[MooncakeStore]:
    """A client of that library; its puts are one call each, see ``test_held_puts`` for those over TCP."""
    opened = MooncakeStore.open(StoreSettings("127.0.0.1:1", protocol="rdma"))
    yield opened
    opened.close()


def test_setup_gets_every_setting(library: Library) -> None:
    """In Mooncake's order; the tenant only where one is set."""
    settings = StoreSettings("127.0.0.1:1", "meta", "rdma", "mlx5_0", 5, 6, "me")
    MooncakeStore.open(settings)
    MooncakeStore.open(StoreSettings("127.0.0.1:1", tenant="team"))
    assert library.setups[0] == (("me", "meta", 5, 6, "rdma", "mlx5_0", "127.0.0.1:1"), {})
    assert library.setups[1][0][0] == "127.0.0.1"
    assert library.setups[1][1] == {"tenant_id": "team"}


def test_a_refused_setup_is_one_sentence(library: Library) -> None:
    """What was given, what was expected, what to do."""
    library.setup_code = -1
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 over rdma given.*code -1 \(INTERNAL_ERROR\): check"):
        MooncakeStore.open(StoreSettings("127.0.0.1:1", protocol="rdma"))


def test_mooncake_is_not_asked_while_nobody_listens(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the interpreter lock while it waits."""
    monkeypatch.setattr(installation, "reachable", lambda master, seconds: False)
    with pytest.raises(StoreUnavailable, match=r"no connection in 10 s: check"):
        MooncakeStore.open(StoreSettings("127.0.0.1:1"))
    assert not library.clients


def test_settings_of_wrong_types_are_one_sentence(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native call refuses them with an exception."""

    def refuse(*_: object, **__: object) -> int:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(Client, "setup", refuse)
    with pytest.raises(StoreUnavailable, match="TypeError: incompatible function arguments"):
        MooncakeStore.open(StoreSettings("127.0.0.1:1"))


def test_null_pointers_and_empty_objects_never_reach_mooncake(store: MooncakeStore, library: Library) -> None:
    """Mooncake would store garbage for a null pointer and call it a success."""
    segments = [[(0, 5)], [(8, 0)], [], [(8, 5), (0, 0)], [(8, 5)]]
    assert store.put_many(["a", "b", "c", "d", ""], segments) == [-600, -600, -600, 0, -600]
    assert [call[0] for call in library.made("batch_put_from_multi_buffers")] == [["d"]]


def test_equal_keys_of_a_get_go_into_different_calls(store: MooncakeStore, library: Library) -> None:
    """Within one call each key comes once (case D14)."""
    assert store.get_many(list("ababa"), [[(8 * i, i)] for i in range(1, 6)]) == [1, 2, 3, 4, 5]
    calls = library.made("batch_get_into_multi_buffers")
    assert [keys for keys, _, _ in calls] == [["a", "b"], ["a", "b"], ["a"]]


def test_what_is_gone_after_a_read_was_not_read(store: MooncakeStore, library: Library) -> None:
    """Its memory may have been another object's meanwhile (case C10); where nobody can say, it was not read either."""
    answers = {"a": 1, "b": 0, "c": codes.RPC_TIMEOUT}
    library.answers["batch_is_exist"] = lambda client, names: [answers[name] for name in names]
    library.answers["batch_get_into_multi_buffers"] = lambda client, names, *_: [
        codes.NOT_FOUND if name == "d" else 8 for name in names
    ]
    found = store.get_many(list("abcd"), [[(8 * i, 8)] for i in range(1, 5)])
    assert found == [8, codes.NOT_FOUND, codes.RPC_TIMEOUT, codes.NOT_FOUND]
    assert library.made("batch_is_exist") == [(["a", "b", "c"],)]


def test_calls_have_at_most_64_keys_and_1024_segments(store: MooncakeStore, library: Library) -> None:
    """Slices in flight beyond Mooncake's queue wedge a client for good (case F10)."""
    store.put_many([f"k{i}" for i in range(200)], [[(8, 1)] * 32] * 200, ["g"] * 200)
    for keys, pointers, _, config in library.made("batch_put_from_multi_buffers"):
        assert len(keys) <= 64
        assert sum(map(len, pointers)) <= 1024
        assert config.group_ids == ["g"] * len(keys)


def test_names_go_in_calls_of_4096(store: MooncakeStore, library: Library) -> None:
    """Removal is forced, because a lookup has just leased everything."""
    names = [f"k{i}" for i in range(5000)]
    assert store.exists_many(names) == [1] * 5000
    assert [len(call[0]) for call in library.made("batch_is_exist")] == [4096, 904]
    store.remove_many(names[:2])
    assert library.made("batch_remove") == [(["k0", "k1"], True)]


@pytest.mark.parametrize("answer", [[], [0], [0, 0, 0], None])
def test_answers_of_another_length_are_no_answers(store: MooncakeStore, library: Library, answer: Any) -> None:
    """Mooncake gives an empty list when it is not set up."""
    library.answers["batch_put_from_multi_buffers"] = lambda *_: answer
    result = store.put_many(["a", "b"], [[(8, 1)]] * 2)
    assert result == [codes.CALL_RAISED if answer is None else codes.NO_ANSWER] * 2


def test_exceptions_become_codes(store: MooncakeStore, library: Library, caplog: pytest.LogCaptureFixture) -> None:
    """Transfer calls never raise; the log has the cause."""

    def broken(*_: object) -> None:
        raise RuntimeError("broken inside")

    for name in ("batch_get_into_multi_buffers", "batch_is_exist", "put", "get"):
        library.answers[name] = broken
    assert store.get_many(["a"], [[(8, 1)]]) == [codes.CALL_RAISED]
    assert store.exists_many(["a"]) == [codes.CALL_RAISED]
    assert store.put_bytes("a", b"x") == codes.CALL_RAISED
    assert store.get_bytes("a") is None
    assert "broken inside" in caplog.text


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("code", [codes.RPC_FAIL, codes.NO_SPACE])
def test_what_may_succeed_at_once_is_tried_once_more(store: MooncakeStore, library: Library, code: int) -> None:
    """Only the keys that failed, and only one more time."""
    replies = [[0, code, 0], [0]]
    library.answers["batch_put_from_multi_buffers"] = lambda *_: replies.pop(0)
    assert store.put_many(["a", "b", "c"], [[(8, 1)]] * 3) == [0, 0, 0]
    assert [call[0] for call in library.made("batch_put_from_multi_buffers")] == [["a", "b", "c"], ["b"]]
    replies[:] = [[code], [code]]
    assert store.put_many(["d"], [[(8, 1)]]) == [code]


def test_what_has_already_waited_is_not_tried_again(
    store: MooncakeStore, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a dead master every call takes seconds."""
    monkeypatch.setattr(mooncake, "_RETRY_BEFORE_SECONDS", 0.0)
    library.answers["batch_is_exist"] = lambda *_: [-900]
    assert store.exists_many(["a"]) == [-900]
    assert len(library.made("batch_is_exist")) == 1


def test_a_refused_registration_names_size_code_and_remedy(store: MooncakeStore, library: Library) -> None:
    """A start-up error that a person can act on."""
    library.answers["register_buffer"] = lambda *_: -1
    with pytest.raises(StoreSetupError, match=r"4096 bytes .* code -1 \(INTERNAL_ERROR\).*ulimit -l"):
        store.register(8, 4096)


def test_close_waits_for_calls_that_are_inside(store: MooncakeStore, library: Library) -> None:
    """Closing under a running call would end the process; new calls answer at once."""
    gate, inside = threading.Event(), threading.Event()

    def hang(*_: object) -> list[int]:
        inside.set()
        gate.wait()
        return [1]

    library.answers["batch_is_exist"] = hang
    answers: list[list[int]] = []
    calling = threading.Thread(target=lambda: answers.append(store.exists_many(["a"])))
    calling.start()
    inside.wait()
    closing = threading.Thread(target=store.close)
    closing.start()
    _until(lambda: store.exists_many(["b"]) == [codes.CLOSED])
    assert not library.closed
    gate.set()
    calling.join()
    closing.join()
    assert answers == [[1]]
    assert library.closed == library.clients


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited 30 s"
        time.sleep(0.005)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """The time now."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the store."""
    made = Clock()
    monkeypatch.setattr(mooncake, "time", made)
    return made


def _wedge(library: Library) -> None:
    """The first client cannot reach its node any more; the master and every later client are well."""

    def get(client: Client, keys: list[str], _: object, sizes: list[list[int]]) -> list[int]:
        return [-800] * len(keys) if client is library.clients[0] else [sum(part) for part in sizes]

    library.answers["batch_get_into_multi_buffers"] = get
    library.answers["batch_put_from_multi_buffers"] = lambda client, keys, *_: (
        [-800 if client is library.clients[0] else 0] * len(keys)
    )


@pytest.mark.parametrize("writes", [False, True])
def test_a_wedged_client_is_replaced(store: MooncakeStore, library: Library, clock: Clock, writes: bool) -> None:
    """Registered memory is registered again, the old client is closed, calls succeed."""
    _wedge(library)
    store.register(8, 100)
    call = store.put_many if writes else store.get_many
    for clock.now in (0.0, 6.0, 13.0):
        assert call(["a"], [[(8, 1)]]) == [-800]
    _until(lambda: store.reopened == 1 and len(library.closed) == 1)
    assert call(["a"], [[(8, 1)]]) == [0 if writes else 1]
    assert library.closed == library.clients[:1]
    assert library.clients[1].ranges == [(8, 100)]


def test_objects_that_the_master_has_forgotten_are_no_reason_for_a_new_client(
    store: MooncakeStore, library: Library, clock: Clock
) -> None:
    """They are gone with their node."""
    _wedge(library)
    library.answers["batch_is_exist"] = lambda _, keys: [0] * len(keys)
    for clock.now in (0.0, 6.0, 13.0):
        store.get_many(["a"], [[(8, 1)]])
    _until(lambda: not store._reopening)
    assert len(library.clients) == 1


def test_no_new_client_is_opened_while_the_master_is_away(store: MooncakeStore, library: Library, clock: Clock) -> None:
    """It could not be set up either."""
    _wedge(library)
    library.answers["batch_is_exist"] = lambda _, keys: [-900] * len(keys)
    for clock.now in (0.0, 6.0, 13.0):
        store.put_many(["a"], [[(8, 1)]])
    _until(lambda: not store._reopening)
    assert len(library.clients) == 1


def test_the_old_client_stays_when_a_new_one_cannot_be_had(
    store: MooncakeStore, library: Library, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Setup refused, or memory not registered."""
    _wedge(library)
    store.register(8, 100)
    library.setup_code = -1
    for clock.now in (0.0, 6.0, 13.0):
        store.get_many(["a"], [[(8, 1)]])
    _until(lambda: not store._reopening)
    library.setup_code = 0
    library.answers["register_buffer"] = lambda *_: -600
    with caplog.at_level(logging.ERROR):
        for clock.now in (50.0, 60.0, 70.0):
            store.get_many(["a"], [[(8, 1)]])
        _until(lambda: not store._reopening)
    assert "-600" in caplog.text
    assert store.reopened == 0
    assert store.exists_many(["a"]) == [1]
    assert library.clients[0].state == "open"
    assert library.clients[2].state == "closed"


def test_a_client_that_holds_capacity_is_never_replaced(library: Library, clock: Clock) -> None:
    """Its objects would be lost, and its memory be needed twice."""
    store = MooncakeStore.open(StoreSettings("127.0.0.1:1", segment_bytes=1 << 20))
    _wedge(library)
    for clock.now in (0.0, 6.0, 13.0, 20.0):
        store.get_many(["a"], [[(8, 1)]])
    assert len(library.clients) == 1


def test_closing_during_a_replacement_leaves_no_client_open(
    store: MooncakeStore, library: Library, clock: Clock
) -> None:
    """The new client comes too late and is closed as well."""
    _wedge(library)
    library.setup_gate = threading.Event()
    for clock.now in (0.0, 6.0, 13.0):
        store.get_many(["a"], [[(8, 1)]])
    _until(lambda: len(library.clients) == 2)
    store.close()
    library.setup_gate.set()
    _until(lambda: sorted(map(id, library.closed)) == sorted(map(id, library.clients)))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (ImportError("libibverbs.so.1: cannot open shared object file"), "libibverbs"),
        (SimpleNamespace(MooncakeDistributedStore=object, ReplicateConfig=object), "batch_put_from_multi_buffers"),
        (SimpleNamespace(), "MooncakeDistributedStore"),
    ],
)
def test_a_missing_or_old_mooncake_says_what_is_installed_and_needed(
    monkeypatch: pytest.MonkeyPatch, module: object, said: str
) -> None:
    """One sentence: the member is disabled and the engine serves."""

    def load(name: str) -> object:
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(installation, "installed", lambda: "mooncake-transfer-engine 0.1")
    monkeypatch.setattr("importlib.import_module", load)
    monkeypatch.setattr(mooncake, "set_environment", lambda settings: None)
    with pytest.raises(StoreUnavailable) as error:
        MooncakeStore.open(StoreSettings("127.0.0.1:1"))
    text = str(error.value)
    assert said in text
    assert "mooncake-transfer-engine 0.1 installed" in text
    assert "mooncake-transfer-engine 0.3.13 or newer needed" in text
    assert "\n" not in text
