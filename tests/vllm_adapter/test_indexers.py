"""Indexers: layers with two caches in one cache group share across TP sizes, and a block has both or is missing.

Blocks of 16 tokens, latents of 8 bytes, keys of 132 bytes in pages as CUDA's kernels write them.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.store import codes
from played_drafts import drafting

if TYPE_CHECKING:
    from played_engine import World
    from played_indexers import IndexerEngine, IndexerWorld

BLOCK, LAYERS = 16, 4
LATENT, KEYS = LAYERS * BLOCK * 8, LAYERS * BLOCK * 132
PROMPT = [3 + n * 7 % 90 for n in range(150)]


@pytest.fixture
def indexers(new_world: "Callable[..., World]", monkeypatch: pytest.MonkeyPatch) -> "Callable[..., IndexerWorld]":
    """Make worlds with indexers, whose engines believe that CUDA's kernels fill their caches."""
    from kvshare_connector import compat
    from played_indexers import IndexerWorld, indexer_cache, shape

    if not hasattr(indexer_cache(BLOCK), "uses_shuffled_layout"):
        pytest.skip("this vLLM does not say how its kernels lay out the keys")
    monkeypatch.setattr(compat, "platform_name", lambda: "cuda")

    def make(**changes: Any) -> "IndexerWorld":
        plain = new_world(shape(**changes))
        return IndexerWorld(plain.config, plain.shape)

    return make


@pytest.fixture
def sparse(indexers: "Callable[..., IndexerWorld]") -> "IndexerWorld":
    """A world whose model has indexers."""
    return indexers()


@pytest.fixture
def engines(sparse: "IndexerWorld") -> "Iterator[Callable[..., IndexerEngine]]":
    """Make engines that end with the test."""
    from played_indexers import IndexerEngine

    made: list[IndexerEngine] = []

    def make(*args: Any, **kwargs: Any) -> IndexerEngine:
        made.append(IndexerEngine(*args, **{"extra": {"staging_bytes": 1 << 17}, **kwargs}))
        return made[-1]

    assert sparse
    yield make
    for engine in made:
        engine.close()


def objects(world: "World", kind: str = "") -> list[str]:
    """Keys of the objects of a kind."""
    return [key for key in world.store.keys if f"/k{kind}" in key]


def test_one_group_has_two_kinds(sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]") -> None:
    """What the other tests here rest on: vLLM's own group, and two geometries."""
    one = engines(sparse, "a", tp=2)
    decision = one.side.decision
    assert (decision.verdict.state, decision.verdict.reason) == ("shared", "Shared"), decision.verdict.message
    assert "kinds: full, indexer" in decision.verdict.message
    assert [(k.name, k.encoding, k.cell_bytes, k.layers) for k in decision.kinds] == [
        ("full", "mla-latent:uint8:8+0", 8, (0, 1, 2, 3)),
        ("indexer", "indexer-pages:fp8:132:16", 132, (0, 1, 2, 3)),
    ]
    assert decision.groups == ((0,), (0,))
    assert not decision.whole
    assert one.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size == BLOCK
    assert len(one.scheduler.kv_cache_config.kv_cache_groups) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((2, "LBHNC"), (1, "BLHNC")),
        ((1, "BLHNC"), (2, "LBNHC")),
        ((4, "LBNHC"), (2, "BLNHC")),
        ((2, "BLNHC"), (8, "LBHNC")),
    ],
)
def test_another_size_and_layout_finds_both_caches(
    sparse: "IndexerWorld",
    engines: "Callable[..., IndexerEngine]",
    writer: tuple[int, str],
    reader: tuple[int, str],
    asynchronous: bool,
) -> None:
    """Every byte of both is compared, by the reader's forward pass and in the store."""
    one = engines(sparse, "a", tp=writer[0], layout=writer[1])
    two = engines(sparse, "b", tp=reader[0], layout=reader[1], asynchronous=asynchronous)
    assert one.side.decision.namespace == two.side.decision.namespace
    for number, length in enumerate((15, 16, 17, 33, 150)):
        prompt = [number + 3, *PROMPT[1:length]]
        assert one.ask(prompt, max_tokens=3) == 0
        assert two.ask(prompt, max_tokens=20) == (length - 1) // BLOCK * BLOCK
    assert sparse.check_store() == len(objects(sparse)) == 2 * len(objects(sparse, "indexer"))
    assert one.used_blocks == two.used_blocks == 0


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_blocks_of_several_pages_are_moved_page_by_page(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]", layout: str
) -> None:
    """A kernel's page may be smaller than a block; then values and scales alternate inside the block."""
    sparse.page = 8
    one, two = engines(sparse, "a", tp=2, layout=layout), engines(sparse, "b", tp=1)
    assert [kind.encoding for kind in one.side.decision.kinds][1] == "indexer-pages:fp8:132:8"
    one.ask(PROMPT, max_tokens=3)
    assert two.ask(PROMPT, max_tokens=20) == 9 * BLOCK
    assert sparse.check_store() == len(objects(sparse)) > 0


def test_engines_whose_pages_differ_do_not_meet(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]"
) -> None:
    """The same block sizes, dtypes and byte counts: the order of the bytes is another one."""
    one = engines(sparse, "a", tp=2)
    one.ask(PROMPT)
    sparse.page = 8
    two = engines(sparse, "b", tp=2)
    assert two.side.decision.verdict.state == "shared"
    assert two.side.decision.namespace != one.side.decision.namespace


def test_bytes_written_are_the_unique_bytes(sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]") -> None:
    """Replicas take turns: every object of either kind is sent once, by whichever rank and engine."""
    one, two = engines(sparse, "a", tp=4), engines(sparse, "b", tp=2)
    for engine in (one, two, one):
        engine.ask(PROMPT, max_tokens=2)
    for engine in (one, two):
        assert engine.pool.reset_prefix_cache()
        engine.ask([*PROMPT, *range(3, 23)], max_tokens=2)
    blocks = (len(PROMPT) + 20) // BLOCK
    assert len(objects(sparse, "full")) == len(objects(sparse, "indexer")) == blocks
    assert one.count("saved_bytes") + two.count("saved_bytes") == blocks * (LATENT + KEYS)


def test_a_block_is_pinned_once(sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]") -> None:
    """Two objects of one block of the engine take one pin."""
    one = engines(sparse, "a", tp=2)
    gate = one.faults.hang("put", lambda key: "/k" in key)
    one.add("r", PROMPT[:64], max_tokens=2)
    one.step_until(lambda: one.side._pins.blocks > 0)
    assert one.side._pins.blocks == 4
    gate.set()
    one.run()
    assert one.used_blocks == 0


@pytest.mark.parametrize("kind", ["full", "indexer"])
@pytest.mark.parametrize("gone", [0, 4, 8])
def test_a_missing_object_of_one_kind_shortens_the_hit(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]", kind: str, gone: int
) -> None:
    """A block has both or it is missing; what is computed again is stored again."""
    engines(sparse, "a", tp=2).ask(PROMPT)
    sparse.store.evict(lambda key: f"/k{kind}" in key and sparse.number(key) == gone)
    assert engines(sparse, "b", tp=1).ask(PROMPT, max_tokens=3) == gone * BLOCK
    sparse.check_store()
    assert engines(sparse, "c", tp=4).ask(PROMPT, max_tokens=3) == 9 * BLOCK


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["full", "indexer"])
@pytest.mark.parametrize("bad", [0, 5, 8])
def test_a_failed_get_of_one_kind_is_reported_by_block(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]", kind: str, bad: int, asynchronous: bool
) -> None:
    """One group: the engine takes block ids, keeps what lies in front of the block, and computes the rest."""
    engines(sparse, "a").ask(PROMPT)
    two = engines(sparse, "b", tp=2, asynchronous=asynchronous)
    two.faults.fail("get", codes.TRANSFER_FAIL, lambda key: f"/k{kind}" in key and sparse.number(key) == bad)
    two.add("r", PROMPT, max_tokens=20)
    two.run()
    assert two.outputs["r"] == two.answer("r")[:20]
    assert two.count("failed_loads") == two.loads_planned == 1
    assert two.count("hit_tokens") == bad * BLOCK
    assert two.used_blocks == 0
    sparse.check_store()


@pytest.mark.parametrize("kind", ["full", "indexer"])
def test_a_failed_put_of_one_kind_is_saved_again(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]", kind: str
) -> None:
    """The other kind of the block is there already and stays as it is."""
    one = engines(sparse, "a", tp=2)
    one.faults.fail("put", codes.TRANSFER_FAIL, lambda key: f"/k{kind}" in key, times=1)
    one.ask(PROMPT)
    there = {sparse.number(key) for key in objects(sparse, kind)}
    (lost,) = set(range(9)) - there
    assert len(objects(sparse)) == 17
    two = engines(sparse, "b", tp=1)
    assert two.ask(PROMPT, max_tokens=2) == lost * BLOCK
    assert len(objects(sparse)) == 18
    assert engines(sparse, "c", tp=4).ask(PROMPT, max_tokens=2) == 9 * BLOCK
    sparse.check_store()


@pytest.mark.parametrize("kind", ["full", "indexer"])
def test_changed_bytes_of_one_kind_are_found(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]", kind: str
) -> None:
    """With digests, whichever of the two is torn: what lies in front of it is used, nothing behind it."""
    extra = {"verify": "checksum", "staging_bytes": 1 << 17}
    engines(sparse, "a", tp=2, extra=extra).ask(PROMPT)
    (torn,) = (key for key in objects(sparse, kind) if sparse.number(key) == 4)
    data = sparse.store.contents.objects[torn]
    sparse.store.contents.objects[torn] = bytes([data[0] ^ 1]) + data[1:]
    two = engines(sparse, "b", tp=4, extra=extra)
    two.add("r", PROMPT, max_tokens=5)
    two.run()
    assert two.outputs["r"] == two.answer("r")[:5]
    assert two.count("hit_tokens") == 4 * BLOCK
    assert sparse.store.contents.objects[torn] == data


def test_direct_transfers_of_pieces_of_both_kinds(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pieces are large the store reads and writes the cache itself; here every piece counts as large."""
    from kvshare_connector.worker import plan

    monkeypatch.setitem(plan.DIRECT_PIECE_BYTES, "tcp", 1)
    one, two = engines(sparse, "a", tp=2, layout="BLHNC"), engines(sparse, "b", tp=1, layout="LBHNC")
    one.ask(PROMPT, max_tokens=3)
    assert two.ask(PROMPT, max_tokens=20) == 9 * BLOCK
    pieces = {
        engine.name: [
            len(planned.pieces)
            for rank in engine.ranks
            if (mover := rank.connector._worker_side._transfers)
            for planned in mover.rank.plan.objects
        ]
        for engine in (one, two)
    }
    assert pieces == {"a": [1, 1, 1, 1], "b": [LAYERS, LAYERS]}
    assert sparse.check_store() == len(objects(sparse))


def test_pipelines_and_layers_without_an_indexer(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]"
) -> None:
    """Some layers use the choice of another one; stages then hold fewer keys than latents, or none."""
    sparse.skipped = frozenset({1, 2, 3})
    extra = {"pipeline_parallel_sizes": [1, 2], "staging_bytes": 1 << 17}
    one, two = engines(sparse, "a", tp=2, pp=2, extra=extra), engines(sparse, "b", tp=1, extra=extra)
    assert [[list(s.layers) for s in cut] for cut in one.side.decision.stages] == [[[0, 1], [2, 3]], [[0]]]
    one.ask(PROMPT, max_tokens=3)
    assert two.ask(PROMPT, max_tokens=20) == 9 * BLOCK
    assert sparse.check_store() == len(objects(sparse))
    assert len(objects(sparse, "full")) == 2 * len(objects(sparse, "indexer"))


def test_an_isolated_engine_keeps_both_for_itself(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]"
) -> None:
    """Rank-local objects, one of each kind, under its own namespace."""
    extra = {"store_tp_size": 3, "staging_bytes": 1 << 17, "prefill_tp_sizes": "two"}
    one = engines(sparse, "a", tp=2, extra=extra)
    assert one.side.decision.verdict.state == "isolated"
    one.ask(PROMPT, max_tokens=3)
    assert one.pool.reset_prefix_cache()
    assert one.ask(PROMPT, max_tokens=3) == 9 * BLOCK
    assert len(objects(sparse, "full")) == len(objects(sparse, "indexer")) == 2 * 9
    assert engines(sparse, "b", tp=4, extra=extra).ask(PROMPT) == 0


def test_a_small_cache_recycles_blocks_under_traffic(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]"
) -> None:
    """Two engines with few blocks and prompts that share prefixes: nobody computes on bytes of somebody else."""
    one, two = engines(sparse, "a", tp=2, blocks=40), engines(sparse, "b", tp=4, blocks=40, layout="BLHNC")
    for number in range(12):
        for engine in (one, two):
            prompt = [*PROMPT[: 32 * (number % 4)], *range(3 + number % 5, 40)]
            engine.add(f"{engine.name}{number}", prompt, max_tokens=9)
        one.step()
        two.step()
    for engine in (one, two):
        engine.run()
        assert engine.used_blocks == 0
        for request_id, answer in engine.outputs.items():
            assert answer == engine.answer(request_id)[: len(answer)]
    assert sparse.check_store() == len(objects(sparse)) > 0


@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_layers_of_a_draft_have_both_caches_too(
    indexers: "Callable[..., IndexerWorld]", engines: "Callable[..., IndexerEngine]", accepted: int
) -> None:
    """MTP: a further layer in the same group; the last block of a hit is dropped once, rejected drafts never saved."""
    world = indexers(draft_layers=1)
    one = engines(world, "a", tp=2, change=drafting("mtp"), accepts=lambda: accepted)
    assert [kind.layers for kind in one.side.decision.kinds] == [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4)]
    one.ask(PROMPT, max_tokens=20)
    assert world.check_store() == 2 * ((len(PROMPT) + 19) // BLOCK)
    two = engines(world, "b", tp=1, layout="BLHNC", change=drafting("mtp"), accepts=lambda: accepted)
    assert two.ask(PROMPT, max_tokens=9) == 8 * BLOCK
    assert two.used_blocks == 0


def test_an_engine_on_another_platform_is_served_without_the_cache(
    sparse: "IndexerWorld", engines: "Callable[..., IndexerEngine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason says what would have to be known."""
    from kvshare_connector import compat

    monkeypatch.setattr(compat, "platform_name", lambda: "rocm")
    one = engines(sparse, "a", tp=2)
    verdict = one.side.decision.verdict
    assert (verdict.state, verdict.reason) == ("disabled", "SeveralKinds")
    assert "the indexer of layer 0: platform rocm given, cuda expected" in verdict.message
    assert one.ask(PROMPT, max_tokens=3) == 0
    assert objects(sparse) == []
