"""Probe: the thread that asks the store for the scheduler, so that a step never waits for the network.

Owns a metadata-only client, opened off the start-up path. It carries out searches, deletions and small objects; it
decides nothing. Results lie in a queue until the scheduler looks.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvshare_connector.lines import Rarely
from kvshare_connector.scheduler.hits import KindObjects, search
from kvshare_connector.scheduler.lookup import Question
from kvshare_connector.store import codes
from kvshare_connector.store.protocol import ObjectStore, StoreError

logger = logging.getLogger(__name__)

#: Seconds between two attempts to open the store.
REOPEN_SECONDS = 5.0
#: What is said while there is no store; the client of a rank has its own line.
AWAY = "lookups cannot reach the store yet, prompts are computed without it and it is tried again every 5 s: %s"
RAISED = "opening the store for lookups raised, it is tried again: please report it"
#: Seconds after which a call counts as hanging, and nobody need wait behind it.
HANGS_SECONDS = 1.0


@dataclass(frozen=True)
class Answer:
    """Result of a search.

    Attributes:
        request_id: whose.
        serial: of which question.
        found: complete blocks from the question's start on.
        absent: hashes of the blocks behind them: at least the first is not complete in the store.
        keys: number of keys that were asked for, by kind.
        seconds: how long the store took.
        failures: calls that failed, by the name of their worst code.
    """

    request_id: str
    serial: int
    found: int
    absent: tuple[bytes, ...]
    keys: Mapping[str, int]
    seconds: float
    failures: Mapping[str, int]


class Probe:
    """Runs store calls of the scheduler process in the background.

    Args:
        open_store: opens the client; raises ``StoreError`` when it cannot.
        overdue: seconds after which a question is not asked any more, because nobody waits for it.
    """

    def __init__(self, open_store: Callable[[], ObjectStore], *, overdue: float) -> None:
        self._open_store, self._overdue = open_store, overdue
        self._work: queue.SimpleQueue[tuple[float, Callable[[ObjectStore], None]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._store: ObjectStore | None = None
        self._call_started: float | None = None
        self._hangs = False
        self._rarely = Rarely(logger)
        self._thread = threading.Thread(target=self._run, name="kvshare-probe", daemon=True)
        self._thread.start()

    def ask(self, question: Question, namespace: str, kinds: Sequence[KindObjects], *, spare: int = 0) -> None:
        """Search for a question's blocks (``spare``: see ``search``); the answer appears in ``answers``."""

        def run(store: ObjectStore) -> None:
            started, asked, found, failures = time.monotonic(), Counter[str](), 0, Counter[str]()
            try:
                steps = search(namespace, question.block_hashes, kinds, spare=spare)
                ask = next(steps)
                while True:
                    asked[ask.kind] += len(ask.keys)
                    answers = store.exists_many(ask.keys)
                    if answers and min(answers) < 0:
                        failures[codes.explain(min(answers)).name] += 1
                    ask = steps.send(answers)
            except StopIteration as end:
                found = end.value
            finally:
                seconds = time.monotonic() - started
                absent = question.block_hashes[found:]
                self._answers.put(Answer(question.request_id, question.serial, found, absent, asked, seconds, failures))

        self._work.put((time.monotonic() + self._overdue, run))

    def run(self, task: Callable[[ObjectStore], None]) -> None:
        """Run a task with the client, whenever there is one."""
        self._work.put((float("inf"), task))

    def answers(self) -> list[Answer]:
        """The answers since the last call."""
        out: list[Answer] = []
        while True:
            try:
                out.append(self._answers.get_nowait())
            except queue.Empty:
                return out

    @property
    def answers_soon(self) -> bool:
        """Whether a question has a chance to be answered: there is a client, and no call hangs in it."""
        started = self._call_started
        hangs = started is not None and time.monotonic() - started >= HANGS_SECONDS
        if hangs and not self._hangs:
            logger.warning(
                "the store has not answered for %g s: prompts are looked up again when it does; look at its master and "
                "at the network to it", HANGS_SECONDS,
            )  # fmt: skip
        elif self._hangs and not hangs:
            logger.info("the store answers again")
        self._hangs = hangs
        return self._store is not None and not hangs

    @property
    def closing(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closing.is_set()

    def close(self) -> None:
        """Stop the thread; a call that hangs in the store is left to die with the process."""
        self._closing.set()
        self._work.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._store is None and not self._try_open():
                self._closing.wait(REOPEN_SECONDS)
                continue
            item = self._work.get()
            if item is None:
                break
            until, task = item
            if time.monotonic() > until or self._store is None:
                continue
            self._call_started = time.monotonic()
            try:
                task(self._store)
            except Exception:
                self._rarely.exception("a background call to the store raised, nothing was found: please report it")
            finally:
                self._call_started = None
        if self._store is not None:
            self._store.close()

    def _try_open(self) -> bool:
        try:
            self._store = self._open_store()
        except StoreError as error:
            self._rarely.warning(AWAY, error)
        except Exception:
            self._rarely.exception(RAISED)
        else:
            if self._rarely.over(AWAY, RAISED):
                logger.info("the store is connected now, lookups begin")
        return self._store is not None
