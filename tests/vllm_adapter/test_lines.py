"""Log lines: one for a change, one summary in a while for what repeats, each with what to do."""

import http.server
import json
import logging
import ssl
import subprocess
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector import lines
from kvshare_connector.counters import OVERDUE, RAISED, Counters
from kvshare_connector.lines import Rarely, Summary
from kvshare_connector.scheduler import reporter
from kvshare_connector.scheduler.reporter import Reporter
from kvshare_connector.store import codes
from kvshare_connector.store.protocol import StoreUnavailable
from kvshare_layout import MemberReport
from kvshare_layout.config import ConnectorConfig
from kvshare_layout.reports import from_json

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock."""
    return Clock()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Our own lines of all levels."""
    ours = logging.getLogger("kvshare_connector")
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(ours, "level", logging.INFO)
    caplog.set_level(logging.INFO, "kvshare_connector")
    return caplog


def said(log: pytest.LogCaptureFixture, *, level: int = logging.INFO) -> list[str]:
    """Our lines from ``level`` on."""
    return [r.getMessage() for r in log.records if r.name.startswith("kvshare_connector") and r.levelno >= level]


def test_a_message_that_repeats_is_said_once_in_a_while_with_the_number_held_back(
    log: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """And at once again after it was over."""
    rarely = Rarely(logging.getLogger("kvshare_connector.x"), seconds=60, clock=clock)
    for _ in range(5):
        rarely.warning("no store: %s", "refused")
        clock.now += 5
    assert said(log) == ["no store: refused"]
    clock.now += 60
    rarely.warning("no store: %s", "refused")
    rarely.warning("something else")
    assert said(log)[1:] == ["no store: refused (4 more of these since the last line)", "something else"]
    assert rarely.over("no store: %s", "never said")
    assert not rarely.over("no store: %s")
    rarely.warning("no store: %s", "again")
    assert said(log)[3:] == ["no store: again"]


def test_failures_are_summarised_by_reason_with_what_each_means(log: pytest.LogCaptureFixture, clock: Clock) -> None:
    """The first at once, the others together when the pause is over; kinds do not wait for each other."""
    summary = Summary("rank 3", seconds=60, clock=clock)
    counters = Counters("rank 3", heard=summary.counted)
    counters.add("loaded_bytes", 5)
    counters.add("failed_keys:get:TRANSFER_FAIL", 2)
    counters.add("failed_keys:put:NO_AVAILABLE_HANDLE", 0)
    counters.add("failed_keys:put:NO_AVAILABLE_HANDLE", 1)
    for _ in range(3):
        clock.now += 10
        counters.add("failed_keys:get:OBJECT_NOT_FOUND", 4)
        counters.add(f"failed_keys:get:{OVERDUE}", 1)
    assert len(said(log)) == 2
    clock.now += 31
    summary.tick()
    summary.tick()
    assert said(log) == [
        "rank 3: 2 keys could not be read (2 TRANSFER_FAIL: a store node is dead, a queue overflowed, or the object is "
        "smaller); their blocks were computed",
        "rank 3: 1 keys could not be stored (1 NO_AVAILABLE_HANDLE: no space: the store is full, fragmented, or has "
        "no node yet); a later request will miss them",
        "rank 3: 15 keys could not be read (12 OBJECT_NOT_FOUND: the object is not in the store; 3 OVERDUE: loads "
        "waited too long behind others, the store is slow or hangs); their blocks were computed",
    ]


def test_what_a_cache_does_in_its_normal_life_is_no_warning(log: pytest.LogCaptureFixture, clock: Clock) -> None:
    """Objects that were evicted between lookup and load are a line of information."""
    summary = Summary("rank 0", clock=clock)
    summary.counted("failed_keys:get:OBJECT_NOT_FOUND", 3)
    assert len(said(log)) == 1
    assert said(log, level=logging.WARNING) == []
    clock.now += lines.QUIET_SECONDS
    summary.counted(f"failed_keys:get:{RAISED}", 3)
    summary.counted("lookup_timeouts", 1)
    summary.counted("dropped_save_blocks", 7)
    assert len(said(log, level=logging.WARNING)) == 3
    assert "staging_bytes" in said(log)[-1]


def test_every_failure_that_is_counted_has_a_line_and_a_meaning() -> None:
    """A counter of failures without one would be silent; so would a reason without a meaning."""
    from kvshare_connector import counters

    names = {name for name, (labels, _) in counters.COUNTERS.items() if "code" in labels}
    assert {key.split(":")[0] for key in lines._TROUBLE} >= names
    for reason in (counters.SHORT_READ, counters.NO_CLIENT, counters.OVERDUE, counters.RAISED):
        assert "trouble" not in lines._meaning(reason)
    for code in codes.CODES.values():
        assert lines._meaning(code.name)


def test_a_store_that_comes_late_is_two_lines_on_each_side(
    world: "World", engines: "Callable[..., Engine]", log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One when it is away, one when it is there, however often it is tried between."""
    from kvshare_connector.scheduler import probe
    from kvshare_connector.store import mooncake
    from kvshare_connector.worker import client
    from played_engine import open_newest

    for module in (probe, client):
        monkeypatch.setattr(module, "REOPEN_SECONDS", 0.01)
    tries: list[int] = []

    def late(*_: object) -> Any:
        tries.append(1)
        if len(tries) < 40:
            raise StoreUnavailable("Mooncake master m:1 over tcp given, no connection: check the address")
        return open_newest()

    monkeypatch.setattr(mooncake.MooncakeStore, "open", late)
    engine = engines(world, "a")
    there = ("the store is connected now, lookups begin", "the store is connected now, blocks are loaded and saved")
    engine.step_until(lambda: all(line in log.text for line in there))
    found = [line for line in said(log) if "store" in line and "verdict" not in line and "shares" not in line]
    assert len([line for line in found if "check the address" in line]) == 2
    assert len([line for line in found if "the store is connected now" in line]) == 2
    assert len(tries) >= 40


def test_a_store_that_stops_answering_is_said_once_and_its_return_too(
    world: "World", engines: "Callable[..., Engine]", log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: a change of state each, not a line for each lookup that is skipped."""
    from kvshare_connector.scheduler import probe

    engine = engines(world, "a", extra={"lookup_timeout_seconds": 1})
    gate, hangs = engine.faults.hang("exists"), threading.Event()
    engine.faults.before("exists", lambda *_: hangs.set())
    for number in range(5):
        engine.add(f"r{number}", [number + 3] * 20)
    engine.step_until(hangs.is_set)
    # Not before a call hangs: whatever is only slow on a busy machine must not be taken for it.
    monkeypatch.setattr(probe, "HANGS_SECONDS", 0.05)
    engine.step_until(lambda: all(engine.outputs.values()))
    for number in range(5):
        engine.add(f"s{number}", [number + 30] * 20)
    engine.step_until(lambda: all(engine.outputs.values()))
    gate.set()
    engine.run()
    engine.step_until(lambda: engine.side._probe.answers_soon)
    assert len([line for line in said(log) if "has not answered for 0.05 s" in line]) == 1
    assert len([line for line in said(log) if "the store answers again" in line]) == 1


def test_failed_loads_of_many_requests_are_one_line(
    world: "World", engines: "Callable[..., Engine]", log: pytest.LogCaptureFixture
) -> None:
    """D6: each costs a miss; the log stays readable."""
    prompts = [[number + 3, *PROMPT[1:]] for number in range(8)]
    writer = engines(world, "a")
    for prompt in prompts:
        writer.ask(prompt)
    reader = engines(world, "b")
    reader.faults.fail("get", codes.TRANSFER_FAIL, lambda key: "kfull" in key and world.number(key) == 2)
    for prompt in prompts:
        reader.ask(prompt)
    assert reader.count("failed_loads") == 8
    assert len([line for line in said(log) if "could not be read" in line]) == 1


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Any]:
    """An operator's endpoint with its own certificate; ``given``: configuration, requests seen, next statuses."""
    files = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", files[0], "-out", files[1], "-days",
         "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True,
    )  # fmt: skip
    seen: list[tuple[str, bytes]] = []
    answers: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.headers.get("Authorization", ""), body))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()
            self.wfile.write(b"because")

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = http.server.HTTPServer(("localhost", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    token = tmp_path / "token"
    token.write_text("secret\n")
    config = ConnectorConfig(
        report_url=f"https://localhost:{server.server_port}/v1/report", report_ca_file=files[1],
        report_token_file=str(token),
    )  # fmt: skip
    server.given = (config, seen, answers)  # type: ignore[attr-defined]
    yield server
    server.shutdown()
    server.server_close()


REPORT = MemberReport("kvs1/p-a/g1", "shared", "Shared", "shares", "", "", 1, 1, 1, (), None, 16)


def _post(config: ConnectorConfig, *reports: MemberReport, then: Callable[[], None] = lambda: None) -> None:
    sender = Reporter(config)
    for report in reports:
        sender.post(report)
    then()
    for thread in [t for t in threading.enumerate() if t.name == "kvshare-report"]:
        thread.join(20)


def test_a_report_is_tried_until_the_operator_has_it(
    operator: Any, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line at the first failure, one when it is stored; the token goes with it."""
    monkeypatch.setattr(reporter, "ATTEMPTS", (0.0, 0.01, 0.02, 0.03))
    config, seen, answers = operator.given
    answers[:] = [503, 401]
    _post(config, REPORT)
    assert [token for token, _ in seen] == ["Bearer secret"] * 3
    assert from_json(seen[-1][1]) == REPORT
    assert [line.split(":")[0] for line in said(log)] == [
        "the report was not delivered at once and is tried again", "the operator has stored the report",
    ]  # fmt: skip


def test_a_report_that_the_operator_refuses_is_not_sent_again(
    operator: Any, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two releases that do not fit: the operator's own words, once."""
    monkeypatch.setattr(reporter, "ATTEMPTS", (0.0, 0.01, 0.02))
    config, seen, answers = operator.given
    answers[:] = [400]
    _post(config, REPORT)
    assert len(seen) == 1
    (line,) = said(log, level=logging.WARNING)
    assert "stays unreported; sharing is not affected (400): because" in line


def test_a_report_that_never_arrives_ends_in_one_line_with_the_last_answer(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator, a wrong address, an address without https: the engine never notices."""
    monkeypatch.setattr(reporter, "ATTEMPTS", (0.0, 0.01, 0.02))
    for url, why in (("https://localhost:9/v1/report", "refused"), ("http://localhost:9/x", "an https:// address")):
        log.clear()
        _post(ConnectorConfig(report_url=url), REPORT)
        assert len(said(log)) == 2
        assert why in said(log, level=logging.WARNING)[0]
        assert "network policy" in said(log, level=logging.WARNING)[0]
    log.clear()
    _post(ConnectorConfig(), REPORT)
    assert said(log) == []


def test_a_newer_report_replaces_one_that_is_still_being_tried(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word of an engine is what the operator keeps."""
    both = threading.Event()
    monkeypatch.setattr(reporter, "time", types.SimpleNamespace(sleep=lambda _: both.wait(20)))
    config, seen, _ = operator.given
    newer = MemberReport("kvs1/p-a/g1", "disabled", "InternalError", "a fault", "", "", 0, 1, 1, (), None, 16)
    _post(config, REPORT, newer, then=both.set)
    assert [json.loads(body)["verdict"] for _, body in seen] == ["disabled"]
