"""Real engines, a real store: a TP 2 engine with a token-major cache and a TP 1 engine with a head-major one."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvshare_layout.config import ConnectorConfig, kv_role_of, to_dotted_flags
from testbed import mooncake
from testbed.completions import Answer, Server
from testbed.engine import engine

pytestmark = pytest.mark.engine

BLOCK = 32
STORE_TP = 4
SOURCE = Path(__file__).resolve().parents[2] / "connector"


def text(seed: int, length: int) -> list[int]:
    """A prompt of bytes that no other seed shares a block with."""
    return [(i * 7 + i // 13 + seed * 31) % 200 + 20 for i in range(length)]


FIRST = text(1, 976)
ONE_TOKEN = text(2, 5 * BLOCK + 7)
EXACT = text(3, 4 * BLOCK)
AFTER_CRASH = text(4, 300)
FOLLOW_UP = text(5, 23)
DECODED = 70


def connector_flags(master: str, role: str, **settings: object) -> list[str]:
    """What the operator would inject."""
    config = ConnectorConfig(
        store_tp_size=STORE_TP, role=role, save_decode_cache=True, cache_namespace="kvs1/p-engines/g1",
        master_server_address=master, block_size_tokens=BLOCK, hash_algorithm="sha256_cbor", staging_bytes=32 << 20,
    )  # fmt: skip
    extra = [f"--kv-transfer-config.kv_connector_extra_config.{key}={value}" for key, value in settings.items()]
    return [*to_dotted_flags(config, kv_role=kv_role_of(role)), "--prefix-caching-hash-algo=sha256_cbor", *extra]


@dataclass
class Shared:
    """The running parts and what the references answered."""

    store: mooncake.Store
    prefill: Server
    decode: Server
    expected: dict[tuple[int, str], Answer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where logs go."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Shared]:
    """References first, one after the other, then both sharing engines on one store."""
    expected: dict[tuple[int, str], Answer] = {}
    for tp, layout in ((1, "HND"), (2, "NHD")):
        with engine(folder, f"reference-{tp}", tp=tp, layout=layout, reference_attention=True) as reference:
            for name, prompt in (("first", FIRST), ("exact", EXACT), ("crash", AFTER_CRASH)):
                expected[tp, name] = reference.server.complete(prompt, max_tokens=16)
            if tp == 1:
                expected[1, "long"] = reference.server.complete(FIRST, max_tokens=DECODED)
            conversation = [*FIRST, *expected[1, "long"].token_ids, *FOLLOW_UP]
            expected[tp, "conversation"] = reference.server.complete(conversation, max_tokens=16)
    environment = {"PYTHONPATH": str(SOURCE)}
    with ExitStack() as stack:
        store = stack.enter_context(mooncake.store(folder, lease_ms=2000))
        running = [
            stack.enter_context(
                engine(
                    folder,
                    role,
                    tp=tp,
                    layout=layout,
                    reference_attention=True,
                    environment=environment,
                    arguments=connector_flags(store.address, role),
                )
            )
            for role, tp, layout in (("prefill", 2, "NHD"), ("both", 1, "HND"))
        ]
        yield Shared(store, running[0].server, running[1].server, expected)


def settle(server: Server, store: mooncake.Store, keys: int) -> None:
    """Wait until the store holds at least ``keys`` objects; saving is asynchronous."""
    deadline = time.monotonic() + 60
    while len(objects(store)) < keys:
        assert time.monotonic() < deadline, f"{len(objects(store))} objects stored, {keys} expected; {server.url}"
        time.sleep(0.1)


def objects(store: mooncake.Store) -> list[str]:
    """Keys of canonical objects in the store."""
    stored = store.master.keys()
    return [key for key in stored if "/kfull" in key]


def test_both_engines_say_that_they_share(shared: Shared) -> None:
    """Verdict shared, one fingerprint and one namespace, although TP size and layout differ."""
    shared.prefill.complete(text(9, 40), max_tokens=1)
    shared.decode.complete(text(9, 40), max_tokens=1)
    infos = [
        next(name for name in server.metrics() if name.startswith("kvshare_member_info"))
        for server in (shared.prefill, shared.decode)
    ]
    assert all('verdict="shared"' in info and 'store_tp="4"' in info for info in infos)
    assert 'layouts="LBNHC"' in infos[0]
    assert 'layouts="LBHNC"' in infos[1]
    namespaces = {info.split('namespace="')[1].split('"')[0] for info in infos}
    assert len(namespaces) == 1


def test_a_prefill_of_one_token_saves_all_its_complete_blocks(shared: Shared) -> None:
    """F5: keys stored = floor(n / block) x S x P, although the request has no block table in the next step."""
    before = len(objects(shared.store))
    shared.prefill.complete(ONE_TOKEN, max_tokens=1)
    wanted = before + len(ONE_TOKEN) // BLOCK * STORE_TP
    settle(shared.prefill, shared.store, wanted)
    assert len(objects(shared.store)) == wanted


def test_what_tp_2_computed_is_not_computed_again_by_tp_1(shared: Shared) -> None:
    """960 of 976 tokens come from the store, and the answer is the one of TP 1 without sharing."""
    before = len(objects(shared.store))
    prefilled = shared.prefill.complete(FIRST, max_tokens=16)
    assert prefilled.token_ids == shared.expected[2, "first"].token_ids
    settle(shared.prefill, shared.store, before + 30 * STORE_TP)
    answer = shared.decode.complete(FIRST, max_tokens=16)
    assert answer.cached_tokens == 960
    assert answer.token_ids == shared.expected[1, "first"].token_ids


def test_a_conversation_on_tp_1_is_read_by_tp_2(shared: Shared) -> None:
    """Decoded blocks are written back, and the other size continues from them."""
    long = shared.decode.complete(FIRST, max_tokens=DECODED)
    assert long.token_ids == shared.expected[1, "long"].token_ids
    complete = (len(FIRST) + DECODED - 1) // BLOCK
    settle(shared.decode, shared.store, complete * STORE_TP)
    conversation = [*FIRST, *long.token_ids, *FOLLOW_UP]
    hits = shared.prefill.metric("kvshare_loaded_blocks_total")
    answer = shared.prefill.complete(conversation, max_tokens=16)
    assert answer.cached_tokens == complete * BLOCK
    assert answer.token_ids == shared.expected[2, "conversation"].token_ids
    assert shared.prefill.metric("kvshare_loaded_blocks_total") > hits


def test_a_prompt_of_whole_blocks_keeps_its_last_block_to_compute(shared: Shared) -> None:
    """There must be a token to sample from: three of four blocks are taken, and the answer is right."""
    before = len(objects(shared.store))
    shared.prefill.complete(EXACT, max_tokens=1)
    settle(shared.prefill, shared.store, before + 4 * STORE_TP)
    answer = shared.decode.complete(EXACT, max_tokens=16)
    assert answer.cached_tokens == 3 * BLOCK
    assert answer.token_ids == shared.expected[1, "exact"].token_ids


def test_no_key_failed_until_here(shared: Shared) -> None:
    """Sharing without faults transfers every key."""
    for server in (shared.prefill, shared.decode):
        assert server.metric("kvshare_failed_keys_total") == 0


def test_a_store_that_dies_costs_time_and_no_answer(shared: Shared) -> None:
    """The only node is killed between saving and reading: the answer is computed and right, nothing fails."""
    before = len(objects(shared.store))
    shared.prefill.complete(AFTER_CRASH, max_tokens=1)
    settle(shared.prefill, shared.store, before + len(AFTER_CRASH) // BLOCK * STORE_TP)
    shared.store.nodes[0].process.kill()
    answer = shared.decode.complete(AFTER_CRASH, max_tokens=16)
    assert answer.token_ids == shared.expected[1, "crash"].token_ids
    assert shared.decode.healthy()
    again = shared.decode.complete(AFTER_CRASH, max_tokens=16)
    assert again.token_ids == shared.expected[1, "crash"].token_ids
