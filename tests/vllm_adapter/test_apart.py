"""Apart: requests that differ only in salt, media or adapter never meet; equal ones do where hashes prove it."""

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_connector.scheduler.apart import kept_apart

if TYPE_CHECKING:
    from played_engine import Engine, World

PROMPT = [(i * 7) % 90 + 5 for i in range(50)]


def picture(content: str, *, offset: int = 9, hasher: Any = hashlib.sha256) -> Any:
    """A feature as the engine's front end makes it from media content."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    digest = hasher(content.encode()).hexdigest()
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=digest, mm_position=PlaceholderRange(offset=offset, length=6)
    )


def named(name: str) -> Any:
    """The same for which the client has chosen a name."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=9, length=6)
    )


def adapter(name: str = "sql", path: str = "/adapters/sql") -> Any:
    """vLLM's own request for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, path)


@pytest.fixture
def seeing(engines: "Callable[..., Engine]") -> "Callable[..., Engine]":
    """Make engines whose scheduler has room for encoder inputs."""

    def make(*args: Any, **kwargs: Any) -> "Engine":
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

        engine = engines(*args, **kwargs)
        engine.scheduler.max_num_encoder_input_tokens = 1000
        engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
        return engine

    return make


def test_equal_salts_share_and_different_ones_never_meet(world: "World", engines: "Callable[..., Engine]") -> None:
    """A7, A8: the salt is in the first block's hash and so in all that follow; no salt is a salt of its own."""
    writer, reader = engines(world, "a", tp=2), engines(world, "b")
    writer.ask(PROMPT, cache_salt="one", flavour=1)
    assert reader.ask(PROMPT, cache_salt="two", flavour=2) == 0
    assert reader.ask(PROMPT) == 0
    assert reader.ask(PROMPT, cache_salt="one", flavour=1) == 48
    assert writer.ask(PROMPT, cache_salt="two", flavour=2) == 48
    assert writer.ask(PROMPT) == 48
    assert world.check_store() == 3 * 48


def test_equal_pictures_share_and_different_ones_meet_up_to_the_picture(
    world: "World", seeing: "Callable[..., Engine]"
) -> None:
    """Blocks in front of a picture are text; with the picture begins what another one must not see."""
    writer, reader = seeing(world, "a", tp=2), seeing(world, "b")
    writer.ask(PROMPT, mm_features=[picture("a cat")])
    assert reader.ask(PROMPT, mm_features=[picture("a cat")]) == 48
    other = seeing(world, "c")
    assert other.ask(PROMPT, mm_features=[picture("a dog")]) == 8
    assert seeing(world, "d").ask(PROMPT, mm_features=[picture("a cat", offset=10)]) == 8
    assert seeing(world, "e").ask(PROMPT) == 8


def test_pictures_that_a_client_has_named_are_kept_apart(world: "World", seeing: "Callable[..., Engine]") -> None:
    """Two clients may call different pictures by one name; nothing is asked for, loaded or saved."""
    writer, reader = seeing(world, "a"), seeing(world, "b")
    writer.ask(PROMPT, mm_features=[named("picture-1")], flavour=1)
    assert reader.ask(PROMPT, mm_features=[named("picture-1")], flavour=2) == 0
    assert [key for key in world.store.keys if "kfull" in key] == []
    assert reader.count("skipped_requests:media_identifier") == 1
    assert reader.count("lookups") == 0


def test_adapters_of_one_name_and_path_never_meet(world: "World", engines: "Callable[..., Engine]") -> None:
    """A7: two pods with different adapters under one name and path; plain requests are not affected."""
    writer, reader = engines(world, "a", tp=2), engines(world, "b")
    writer.ask(PROMPT, lora_request=adapter(), flavour=1, max_tokens=20)
    assert [key for key in world.store.keys if "kfull" in key] == []
    writer.ask(PROMPT)
    assert reader.ask(PROMPT, lora_request=adapter(), flavour=2) == 0
    assert reader.ask(PROMPT) == 48
    assert reader.count("skipped_requests:lora") == 1
    assert world.check_store() == 48
    assert reader.used_blocks == writer.used_blocks == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sessions_with_streamed_input_are_kept_apart(
    world: "World", engines: "Callable[..., Engine]", asynchronous: bool
) -> None:
    """The last token of a turn completes a block and is taken back; vLLM before 0.32 keeps the hash of that block."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import RequestStatus

    from played_model import Text

    one = engines(world, "a", asynchronous=asynchronous)
    stop = one.world.shape.block_tokens * 3
    last = Text(PROMPT[:9], 0).tokens(stop)[-1]
    turn = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[last])
    one.add("s", PROMPT[:9], resumable=True, sampling_params=turn)
    session = one._requests["s"]

    def waits() -> bool:
        return session.status == RequestStatus.WAITING_FOR_STREAMING_REQ and not one._queue

    one.step_until(waits)
    assert len(session.block_hashes) == 3
    more = [last + 1, *range(40, 60)]
    text = Text([*session._all_token_ids[: session.num_computed_tokens], *more], 0)
    one.add("s", more, max_tokens=2, resumable=True)
    one._texts["s"], one._requests["s"] = text, session
    one.step_until(waits)
    one.abort("s")
    one.run()
    assert [key for key in world.store.keys if "kfull" in key] == []
    assert one.count("skipped_requests:streamed_input") == 1
    assert one.count("lookups") == 0
    assert one.used_blocks == 0


@pytest.mark.parametrize(
    ("hasher", "apart"),
    [(hashlib.sha256, ""), (hashlib.sha512, ""), (hashlib.md5, "media_identifier"), (hashlib.sha1, "media_identifier")],
)
def test_digests_of_vllms_hashers_are_known_by_their_form(played: Any, hasher: Any, apart: str) -> None:
    """blake3 and sha256 give 64 digits, sha512 gives 128; anything else was not made by the engine."""
    assert played
    features = [picture("a"), picture("b", hasher=hasher)]
    assert kept_apart(SimpleNamespace(lora_request=None, mm_features=features)) == apart


def test_vllms_own_hasher_gives_such_digests(played: Any) -> None:
    """All algorithms that vLLM offers, on the content of an item."""
    assert played
    from typing import get_args

    from vllm.multimodal import hasher

    for algorithm in get_args(hasher.MMHasherAlgorithm):
        digest = hasher.MultiModalHasher.hash_kwargs(algorithm, model_id="m", image=b"content")
        feature = SimpleNamespace(identifier=digest)
        assert kept_apart(SimpleNamespace(lora_request=None, mm_features=[feature])) == ""


@pytest.mark.parametrize(("version", "state"), [((0, 31), "disabled"), ((0, 32), "shared")])
def test_an_engine_whose_own_cache_keeps_taken_back_tokens_caches_nothing_from_the_first_session_on(
    world: "World",
    engines: "Callable[..., Engine]",
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    state: str,
) -> None:
    """Other requests find its blocks there, under hashes that are not theirs."""
    from kvshare_connector import compat

    one = engines(world, "a")
    one.ask(PROMPT)
    saved = len(world.store.keys)
    monkeypatch.setattr(compat, "version", lambda: version)
    one.add("s", PROMPT[:9], resumable=True)
    for _ in range(5):
        one.step()
    assert one.side.decision.verdict.state == state
    one.ask([7, *PROMPT])
    assert (len(world.store.keys) > saved) is (state == "shared")
