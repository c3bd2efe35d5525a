"""The proposal's run with several prefill sizes: two prefill engines and one decode engine on one cache.

Each prefill computes one prefix; decode takes both, answers, and writes its answers back; then each prefill takes the
conversation whose prefix the *other* one has computed.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from testbed import mooncake
from testbed.completions import Answer, Server
from testbed.engine import engine
from testbed.sharing import BLOCK, ENVIRONMENT, connector_flags, member, settle, text, troubles

pytestmark = pytest.mark.matrix

STORE_TP, DECODED, ANSWER_TOKENS = 4, 64, 16
MEMBERS = {"big": (4, "HND", "prefill"), "small": (2, "NHD", "prefill"), "decode": (2, "NHD", "decode")}
PREFIX = {"big": text(1, 976), "small": text(2, 976)}
OTHER = {"big": "small", "small": "big"}
FOLLOW_UP = text(3, 23)


@dataclass
class Run:
    """The engines by name, and what engines of the same TP size without connector answer, by size and question."""

    store: mooncake.Store
    servers: dict[str, Server]
    expected: dict[tuple[int, str], Answer]


def conversation(expected: dict[tuple[int, str], Answer], prefix: str) -> list[int]:
    """A prefix, the answer that decode gives to it, and a further question."""
    return [*PREFIX[prefix], *expected[2, prefix].token_ids, *FOLLOW_UP]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """References first; decode's answers make the conversations."""
    folder = tmp_path_factory.mktemp("prefills")
    expected: dict[tuple[int, str], Answer] = {}
    for tp in (2, 4):
        with engine(folder, f"reference-{tp}", tp=tp, layout="HND", reference_attention=True) as reference:
            for name, prefix in PREFIX.items():
                expected[tp, name] = reference.server.complete(prefix, max_tokens=DECODED)
            for name in PREFIX:
                question = conversation(expected, name)
                expected[tp, f"{name}+"] = reference.server.complete(question, max_tokens=ANSWER_TOKENS)
    with ExitStack() as stack:
        found = Run(stack.enter_context(mooncake.store(folder)), {}, expected)
        for name, (tp, layout, role) in MEMBERS.items():
            running = engine(
                folder, name, tp=tp, layout=layout, reference_attention=True, environment=ENVIRONMENT,
                arguments=connector_flags(found.store, store_tp=STORE_TP, role=role),
            )  # fmt: skip
            found.servers[name] = stack.enter_context(running).server
        yield found


def test_both_prefixes_are_reused_and_both_write_backs_read_by_the_other_prefill(run: Run) -> None:
    """TP 4 head-major and TP 2 token-major prefill, TP 2 decode, Store TP 4: all hits, all answers right."""
    prefix_blocks = len(PREFIX["big"]) // BLOCK
    complete = (len(PREFIX["big"]) + DECODED - 1) // BLOCK
    for number, name in enumerate(PREFIX, start=1):
        written = run.servers[name].complete(PREFIX[name], max_tokens=1)
        assert written.cached_tokens == 0
        settle(run.store, number * prefix_blocks * STORE_TP)
    for number, name in enumerate(PREFIX, start=1):
        answer = run.servers["decode"].complete(PREFIX[name], max_tokens=DECODED)
        assert (answer.cached_tokens, answer.token_ids) == (prefix_blocks * BLOCK, run.expected[2, name].token_ids)
        settle(run.store, (2 * prefix_blocks + number * (complete - prefix_blocks)) * STORE_TP)
    for name, (tp, _, role) in MEMBERS.items():
        if role == "prefill":
            theirs = OTHER[name]
            answer = run.servers[name].complete(conversation(run.expected, theirs), max_tokens=ANSWER_TOKENS)
            expected = run.expected[tp, f"{theirs}+"]
            assert (answer.cached_tokens, answer.token_ids) == (complete * BLOCK, expected.token_ids)
    assert {member(server)["verdict"] for server in run.servers.values()} == {"shared"}
    assert [troubles(server) for server in run.servers.values()] == [{}, {}, {}]
