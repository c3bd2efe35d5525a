"""Every pair of writer and reader: TP sizes and physical layouts on real engines, one after the other on one store.

Each engine runs twice. In its first life it stores a prompt of its own and reads what earlier engines stored; in its
second it reads everything that it has not read yet. So every writer meets every reader; the store outlives them all.
"""

import datetime
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvshare_layout.config import ConnectorConfig, to_dotted_flags
from testbed import mooncake, places
from testbed.completions import Answer, Server
from testbed.engine import engine
from testbed.sharing import ENVIRONMENT, troubles

pytestmark = pytest.mark.matrix

BLOCK, PROMPT_TOKENS, ANSWER_TOKENS, STORE_TP = 32, 976, 64, 4
CACHED = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
TABLE = places.REPOSITORY / "docs" / "benchmarks" / "matrix.md"


@dataclass(frozen=True)
class Member:
    """One engine: TP size and layout, as ``VLLM_KV_CACHE_LAYOUT`` takes it."""

    tp: int
    layout: str

    def __str__(self) -> str:
        return f"TP{self.tp} {self.layout}"


#: HND is LBHNC and NHD is LBNHC; the other four layouts run at TP 2.
MEMBERS = (
    Member(4, "HND"), Member(4, "NHD"), Member(2, "HND"), Member(2, "NHD"), Member(1, "HND"), Member(1, "NHD"),
    Member(2, "LHBNC"), Member(2, "BLHNC"), Member(2, "BLNHC"), Member(2, "BHLNC"),
)  # fmt: skip


def prompt_of(writer: Member) -> list[int]:
    """A prompt that no other writer shares a block with."""
    seed = MEMBERS.index(writer) + 1
    return [(i * 7 + i // 13 + seed * 17 + i * seed % 11) % 200 + 20 for i in range(PROMPT_TOKENS)]


@dataclass
class Matrix:
    """What was found.

    Attributes:
        expected: what an engine of the same TP size without connector answers, by TP size and writer's prompt.
        cells: right or what was wrong, by writer and reader.
        failed_keys: keys that failed, over all engines.
    """

    expected: dict[tuple[int, Member], Answer] = field(default_factory=dict)
    cells: dict[tuple[Member, Member], str] = field(default_factory=dict)
    failed_keys: float = 0


def settle(store: mooncake.Store, prompts: int) -> None:
    """Wait until that many prompts are in the store whole; saving is asynchronous, and the writer ends soon."""
    wanted, deadline = prompts * (PROMPT_TOKENS // BLOCK) * STORE_TP, time.monotonic() + 60
    while (found := "\n".join(store.master.keys()).count("/kfull")) < wanted:
        assert time.monotonic() < deadline, f"{found} objects stored, {wanted} expected"
        time.sleep(0.1)


def judge(answer: Answer, expected: Answer, cached: int) -> str:
    """``ok``, or what is wrong."""
    wrong = [f"{answer.cached_tokens} cached"] if answer.cached_tokens != cached else []
    if answer.token_ids != expected.token_ids:
        wrong.append("other tokens")
    return ", ".join(wrong) or "ok"


def read_all(server: Server, reader: Member, writers: list[Member], matrix: Matrix) -> None:
    """Ask for every writer's prompt; each answer is judged against the same TP size without sharing."""
    for writer in writers:
        answer = server.complete(prompt_of(writer), max_tokens=ANSWER_TOKENS)
        matrix.cells[writer, reader] = judge(answer, matrix.expected[reader.tp, writer], CACHED)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Run all engines, then write the table, whatever it says."""
    folder, found = tmp_path_factory.mktemp("matrix"), Matrix()
    for tp in sorted({member.tp for member in MEMBERS}):
        with engine(folder, f"reference-{tp}", tp=tp, layout="HND", reference_attention=True) as reference:
            for writer in MEMBERS:
                found.expected[tp, writer] = reference.server.complete(prompt_of(writer), max_tokens=ANSWER_TOKENS)
    with mooncake.store(folder) as store:
        config = ConnectorConfig(
            store_tp_size=STORE_TP, cache_namespace="kvs1/p-matrix/g1", master_server_address=store.address,
            block_size_tokens=BLOCK, hash_algorithm="sha256_cbor", staging_bytes=32 << 20,
        )  # fmt: skip
        flags = [*to_dotted_flags(config, kv_role="kv_both"), "--prefix-caching-hash-algo=sha256_cbor"]
        stored: list[Member] = []
        for life in (1, 2):
            for member in MEMBERS:
                name = f"{life}-{member}".replace(" ", "-")
                with engine(
                    folder, name, tp=member.tp, layout=member.layout, reference_attention=True,
                    arguments=flags, environment=ENVIRONMENT,
                ) as running:  # fmt: skip
                    if life == 1:
                        answer = running.server.complete(prompt_of(member), max_tokens=ANSWER_TOKENS)
                        found.cells[member, member] = judge(answer, found.expected[member.tp, member], 0)
                        read_all(running.server, member, stored, found)
                        stored.append(member)
                        settle(store, len(stored))
                    else:
                        unread = [w for w in stored if (w, member) not in found.cells or w == member]
                        read_all(running.server, member, unread, found)
                    found.failed_keys += running.server.metric("kvshare_failed_keys_total")
                    wrong = [f"{w}: {cell}" for (w, r), cell in found.cells.items() if r == member and cell != "ok"]
                    print(
                        f"{name}: {len(found.cells)} of {len(MEMBERS) ** 2} pairs, wrong: {wrong}, "
                        f"troubles: {troubles(running.server)}",
                        flush=True,
                    )
    write_table(found, TABLE)
    return found


def write_table(matrix: Matrix, path: Path) -> None:
    """The dated table for the documentation."""
    right = sum(cell == "ok" for cell in matrix.cells.values())
    lines = [
        "# Every writer with every reader",
        "",
        f"{datetime.date.today().isoformat()}, written by `make test-matrix` on {os.cpu_count()} cores: vLLM on CPU "
        "with the any-layout reference attention, Mooncake over TCP, a float32 Llama with 4 KV heads, Store TP 4. "
        f"Rows wrote, columns read: *ok* means {CACHED} of {PROMPT_TOKENS} prompt tokens came from the store and all "
        f"{ANSWER_TOKENS} answer tokens equal those of an engine of the reader's TP size without connector. "
        f"{right} of {len(MEMBERS) ** 2} pairs ok, {matrix.failed_keys:.0f} failed keys.",
        "",
        "| wrote \\ reads | " + " | ".join(map(str, MEMBERS)) + " |",
        "|---" * (len(MEMBERS) + 1) + "|",
    ]
    for writer in MEMBERS:
        cells = (matrix.cells.get((writer, reader), "not run") for reader in MEMBERS)
        lines.append(f"| {writer} | " + " | ".join(cells) + " |")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("reader", MEMBERS, ids=str)
@pytest.mark.parametrize("writer", MEMBERS, ids=str)
def test_reader_takes_from_writer(matrix: Matrix, writer: Member, reader: Member) -> None:
    """B4: 960 of 976 tokens from the store, and the answer of the reader's own TP size."""
    assert matrix.cells.get((writer, reader)) == "ok"


def test_no_key_failed(matrix: Matrix) -> None:
    """Nothing but whole transfers in the whole run."""
    assert matrix.failed_keys == 0
