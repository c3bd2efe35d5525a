"""Fault trials: a pair of sharing engines, one fault at a time under traffic, and what must hold in every one.

They share a Mooncake of two nodes, usually TP 2 with a token-major cache and TP 1 with a head-major one. Each engine
reaches the master through a relay of its own, so that one of them alone can lose it.
"""

import contextlib
import datetime
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from kvshare_layout.config import CONNECTOR_CLASS, CONNECTOR_MODULE, ConnectorConfig, to_dotted_flags
from testbed import mooncake, places
from testbed.completions import Server
from testbed.engine import Engine, engine
from testbed.faulty_connector import FAULTS, FaultSettings, write_faults
from testbed.relay import Relay
from testbed.store_faults import repeating
from testbed.traffic import (
    Expected,
    Member,
    Prompt,
    Record,
    Texts,
    Tokens,
    Traffic,
    ask,
    median,
    percentile,
)

STORE_TP = 4
NAMESPACE = "kvs1/p-faults/g1"
#: What the pool says; models with states have larger ones.
BLOCK_TOKENS = 32
#: Blocks of each engine's own cache: less than the traffic's prompts need, so that it keeps asking the store.
OWN_BLOCKS = 96
SEGMENT = "96mb"
SOURCES = f"{places.REPOSITORY / 'connector'}:{places.REPOSITORY / 'tests'}"
#: Longest time after the end of a fault in which hits must come back.
RECOVERY_SECONDS = 60.0


@dataclass(frozen=True)
class Setup:
    """What both engines run.

    Attributes:
        model: the default tiny model when None.
        sizes: TP size and layout of the two engines.
        reference: they run the any-layout attention.
        dtype: type of weights, activations and cache.
        margin: see ``Expected.answers``.
        arguments: more of the engines; by default those that make their own caches small.
        texts: lengths of the traffic's prompts.
    """

    model: Path | None = None
    sizes: tuple[tuple[int, str], tuple[int, str]] = ((2, "NHD"), (1, "HND"))
    reference: bool = True
    dtype: str = "float32"
    margin: float = 0.0
    arguments: tuple[str, ...] = (f"--num-gpu-blocks-override={OWN_BLOCKS}",)
    texts: Texts = field(default_factory=Texts)

    def expected(
        self, known: Expected, folder: Path, which: int, prompts: Sequence[tuple[Prompt, int]]
    ) -> Mapping[Prompt, Tokens]:
        """What an engine like one of the two answers without a shared cache."""
        tp, layout = self.sizes[which]
        return known.answers(
            folder,
            prompts,
            tp=tp,
            layout=layout,
            model=self.model,
            reference_attention=self.reference,
            dtype=self.dtype,
            margin=self.margin,
        )

    def traffic(self, trial: str, expected: Mapping[Prompt, Tokens]) -> list[Prompt]:
        """The prompts of a trial's traffic whose answers are known."""
        return [prompt for prompt in self.texts.traffic(trial) if prompt in expected]

    def recovery(self, trial: str, expected: Mapping[Prompt, Tokens]) -> list[Prompt]:
        """The prompts by which a trial looks whether sharing has come back, where their answers are known."""
        return [prompt for prompt in self.texts.recovery(trial) if prompt in expected]


PLAIN = Setup()


@dataclass(frozen=True)
class Outcome:
    """What one trial showed, a row of the table.

    Attributes:
        trial: name.
        title: what went wrong, a phrase.
        date: when.
        requests: answered while the fault was there.
        median_ratio: median latency during the fault, to the fault-free run.
        tail_ratio: the same for the 95th percentile.
        longest: seconds of the longest request.
        recovery: seconds from the end of the fault until both engines took blocks of the other again.
        seen: what the connector counted, by name.
        wrong: requests with other tokens, texts.
        failed: requests without an answer, texts.
    """

    trial: str
    title: str
    date: str
    requests: int
    median_ratio: float
    tail_ratio: float
    longest: float
    recovery: float
    seen: Mapping[str, int]
    wrong: Sequence[str] = ()
    failed: Sequence[str] = ()


@dataclass
class Running:
    """An engine that can be killed and started again."""

    member: Member
    engine: Engine
    stack: ExitStack

    @property
    def server(self) -> Server:
        """Where it listens now."""
        return self.engine.server


@dataclass
class Pair:
    """Two engines that share, their store, and their switches.

    Attributes:
        folder: for logs.
        store: master and nodes.
        relays: one for each engine, between it and the master.
        writer: the first engine.
        reader: the second one.
        faults: the file of each engine's faulty store edge.
        calm: latencies without any fault, seconds.
        first: the trial without any fault.
    """

    folder: Path
    store: mooncake.Store
    relays: tuple[Relay, Relay]
    writer: Running
    reader: Running
    faults: tuple[Path, Path]
    verify: str = "size"
    setup: Setup = PLAIN
    calm: list[float] = field(default_factory=list)
    first: Outcome | None = None

    @property
    def both(self) -> tuple[Running, Running]:
        """Both engines."""
        return self.writer, self.reader

    def misbehave(self, faults: FaultSettings, *, whose: int | None = None) -> None:
        """Let the store edges of both engines, or of one, go wrong from now on."""
        for number, path in enumerate(self.faults):
            if whose in (None, number):
                write_faults(path, faults)

    @contextlib.contextmanager
    def misbehaving(self, faults: FaultSettings, *, whose: int | None = None) -> Iterator[None]:
        """The same for the length of a block."""
        self.misbehave(faults, whose=whose)
        try:
            yield
        finally:
            self.misbehave(FaultSettings())

    def restart_master(self) -> None:
        """A new master on the port of the old one, which has ended."""
        self.store.master = mooncake.start_master(self.folder, port=self.store.master.port, lease_ms=2000)

    def add_node(self) -> None:
        """One more store node."""
        name = f"{len(self.store.nodes)}"
        self.store.nodes.append(mooncake.start_node(self.folder, self.store.master, segment=SEGMENT, name=name))

    def drop_node(self, number: int) -> None:
        """Kill a store node as a crash would."""
        self.store.nodes[number].process.kill()

    def start_again(self, which: int, *, arguments: Sequence[str] = ()) -> None:
        """Start an engine again whose process has ended."""
        old = self.both[which]
        old.stack.close()
        setup = replace(self.setup, arguments=tuple(arguments)) if arguments else self.setup
        new = start_engine(
            self.folder, old.member, which, self.relays[which].address, self.faults[which], setup, verify=self.verify
        )
        if which == 0:
            self.writer = new
        else:
            self.reader = new


#: Starts what goes wrong, and ends it.
Fault = Callable[[Pair, Traffic], contextlib.AbstractContextManager[None]]


def start_engine(
    folder: Path,
    member: Member,
    which: int,
    master: str,
    faults: Path,
    setup: Setup = PLAIN,
    *,
    namespace: str = NAMESPACE,
    verify: str = "size",
) -> Running:
    """Start the first or the second engine with the faulty connector; it ends with ``stack`` of what is returned."""
    tp, layout = setup.sizes[which]
    config = ConnectorConfig(
        store_tp_size=STORE_TP, save_decode_cache=True, cache_namespace=namespace, master_server_address=master,
        block_size_tokens=BLOCK_TOKENS, hash_algorithm="sha256_cbor", staging_bytes=32 << 20, verify=verify,
    )  # fmt: skip
    flags = [
        flag.replace(f"={CONNECTOR_CLASS}", "=FaultyConnector").replace(
            f"={CONNECTOR_MODULE}", "=testbed.faulty_connector"
        )
        for flag in to_dotted_flags(config, kv_role="kv_both")
    ]
    stack = ExitStack()
    started = stack.enter_context(
        engine(
            folder, member.name.replace(" ", "-"), tp=tp, layout=layout, reference_attention=setup.reference,
            model=setup.model, dtype=setup.dtype,
            arguments=[*flags, "--prefix-caching-hash-algo=sha256_cbor", *setup.arguments],
            environment={"PYTHONPATH": SOURCES, FAULTS: str(faults), "VLLM_SERVER_DEV_MODE": "1"},
        )
    )  # fmt: skip
    member.server, member.may_fail = started.server, False
    return Running(member, started, stack)


@contextlib.contextmanager
def pair(folder: Path, trials: Mapping[str, int], setup: Setup = PLAIN, *, verify: str = "size") -> Iterator[Pair]:
    """The two engines and their store, for some trials.

    Args:
        folder: for logs.
        trials: length of the answers by name of the trial.
        setup: what the engines run.
        verify: what proves a load.
    """
    prompts = [(p, n) for name, n in trials.items() for p in setup.texts.traffic(name)]
    prompts += [(p, 4) for name in trials for p in setup.texts.recovery(name)]
    known, different = Expected(), range(len(set(setup.sizes)))
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda which: setup.expected(known, folder, which, prompts), different))
    answers = [answers[0], answers[-1]]
    files = (folder / "faults-writer", folder / "faults-reader")
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(folder, nodes=2, segment=SEGMENT, lease_ms=2000))
        relays = (Relay(store.master.port), Relay(store.master.port))
        for relay in relays:
            stack.callback(relay.close)
        names = [f"{which} TP {tp}" for which, (tp, _) in zip(("first", "second"), setup.sizes, strict=True)]
        members = [Member(name, Server(""), expected) for name, expected in zip(names, answers, strict=True)]

        def start(which: int) -> Running:
            return start_engine(
                folder, members[which], which, relays[which].address, files[which], setup, verify=verify
            )

        # An engine ends with the thread that has started it, so the threads stay as long as the engines.
        starters = stack.enter_context(ThreadPoolExecutor(2))
        running = list(starters.map(start, range(2)))
        made = Pair(folder, store, relays, running[0], running[1], files, verify, setup)
        try:
            yield made
        finally:
            for one in made.both:
                one.stack.close()


def counted(server: Server) -> Counter[str]:
    """What the connector of an engine has counted, that belongs into the table, by a short name."""
    out: Counter[str] = Counter()
    for sample, value in server.metrics().items():
        name, _, labels = sample.partition("{")
        if (found := re.fullmatch(r"kvshare_(\w+)_total", name)) is None:
            continue
        match found[1]:
            case "failed_keys":
                code, operation = (re.search(f'{label}="([^"]*)"', labels) for label in ("code", "operation"))
                if code and operation:
                    out[f"{operation[1]} {code[1]}"] += int(value)
            case "loaded_blocks" | "failed_loads" | "lookup_timeouts" | "lookups_skipped" | "failed_lookups":
                out[found[1].replace("_", " ")] += int(value)
            case "dropped_save_blocks":
                out["dropped saves"] += int(value)
    return out


def run_trial(
    pair: Pair,
    trial: str,
    title: str,
    fault: Fault,
    *,
    seconds: float = 7,
    members: Sequence[Running] | None = None,
) -> Outcome:
    """Traffic, then the fault for ``seconds``, then traffic without it, then the way back to hits.

    Args:
        pair: the engines.
        trial: its name, which chooses the prompts.
        title: what goes wrong.
        fault: starts the fault and ends it.
        seconds: length of the fault, besides what ``fault`` itself takes.
        members: who gets traffic; both engines when None.
    """
    asked = tuple(one.member for one in (members or pair.both))
    before = sum((counted(one.server) for one in pair.both), Counter[str]())
    with Traffic(asked, pair.setup.traffic(trial, asked[0].expected)) as traffic:
        time.sleep(2)
        start = time.monotonic()
        with fault(pair, traffic):
            traffic.wait_for(lambda: False, seconds)
        end = time.monotonic()
        time.sleep(1)
    recovery = recover(pair, trial, end, traffic.records)
    during = [r.end - r.start for r in traffic.records if r.end > start and r.start < end and not r.failed]
    if not pair.calm:
        pair.calm = during
    after = sum((counted(one.server) for one in pair.both), Counter[str]())
    return Outcome(
        trial, title, datetime.date.today().isoformat(), len(traffic.records),
        median(during) / median(pair.calm), percentile(during, 0.95) / percentile(pair.calm, 0.95),
        max(during, default=0.0), recovery, dict(after - before),
        [f"{r.member}: {r.wrong}" for r in traffic.records if r.wrong],
        [f"{r.member}: {r.failed}" for r in traffic.records if r.failed],
    )  # fmt: skip


def recover(pair: Pair, trial: str, since: float, records: list[Record]) -> float:
    """Seconds from ``since`` until each engine has taken blocks that the other has just computed; -1 for never."""
    waiting, setup = [(pair.writer, pair.reader), (pair.reader, pair.writer)], pair.setup
    with httpx.Client() as client:
        for prompt in setup.recovery(trial, pair.reader.member.expected):
            first, second = waiting[0]
            records.append(ask(first.member, prompt, client))
            time.sleep(0.5)
            records.append(ask(second.member, prompt, client))
            if records[-1].cached >= setup.texts.block and (waiting := waiting[1:]) == []:
                return time.monotonic() - since
            if time.monotonic() - since > RECOVERY_SECONDS:
                break
            time.sleep(0.5 if records[-1].cached else 4)
    return -1.0


@contextlib.contextmanager
def losing_objects(pair: Pair, _: Traffic) -> Iterator[None]:
    """Objects leave between lookup and load, in a third of all loads."""
    with pair.misbehaving(FaultSettings(removed=0.3)):
        yield


@contextlib.contextmanager
def killing_a_node(pair: Pair, _: Traffic) -> Iterator[None]:
    """One of two store nodes is killed."""
    pair.drop_node(0)
    yield


@contextlib.contextmanager
def killing_the_master(pair: Pair, _: Traffic) -> Iterator[None]:
    """The master is killed, and started again at the end."""
    pair.store.master.process.kill()
    yield
    pair.restart_master()


@contextlib.contextmanager
def hanging_up(pair: Pair, traffic: Traffic) -> Iterator[None]:
    """Clients that ask both engines in turn and hang up within 0.15 s, while loads take longer."""
    number, prompts = 0, traffic.prompts

    def hang_up() -> None:
        nonlocal number
        number += 1
        server = pair.both[number % 2].server
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": list(prompts[number % len(prompts)]), "max_tokens": 64, "ignore_eos": True},
                timeout=0.02 + number % 5 * 0.03,
            )

    with pair.misbehaving(FaultSettings(get_seconds=0.1)), repeating(hang_up, 0.05):
        yield


def judge(pair: Pair, outcome: Outcome) -> None:
    """What every trial must show: no wrong token, no failed request, engines alive, hits back.

    Raises:
        AssertionError: with the first few requests that went wrong.
    """
    assert not outcome.wrong, f"{len(outcome.wrong)} of {outcome.requests} answers wrong: {outcome.wrong[:3]}"
    assert not outcome.failed, f"{len(outcome.failed)} of {outcome.requests} requests failed: {outcome.failed[:3]}"
    assert outcome.requests > 0
    assert all(one.server.healthy() for one in pair.both)
    assert outcome.recovery >= 0, f"no hits {RECOVERY_SECONDS:.0f} s after the end of the fault"
