"""Facts of the engine: what the model's configuration says about the bytes of a cache."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from played_engine import Engine, World


@pytest.fixture(scope="module")
def facts(played: ModuleType) -> ModuleType:
    """The module under test; it imports vLLM, which ``played`` does quietly."""
    assert played
    from kvshare_connector.scheduler import engine_facts

    return engine_facts


class Config:
    """A model configuration as vLLM holds it."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def to_json_string(self, *, use_diff: bool) -> str:
        """All fields, also the default ones."""
        assert not use_diff
        return json.dumps(self._fields)


def test_where_a_model_lies_is_no_part_of_it(facts: ModuleType) -> None:
    """A2: equal configurations from two mount paths are one model; another rope scaling is another."""
    one, two = Config(_name_or_path="/mnt/models", hidden_size=64), Config(_name_or_path="/srv/llama", hidden_size=64)
    scaled = Config(_name_or_path="/mnt/models", hidden_size=64, rope_scaling={"type": "linear", "factor": 2.0})
    assert facts._model_digest(one) == facts._model_digest(two)
    assert facts._model_digest(one) != facts._model_digest(scaled)


@pytest.mark.parametrize(
    ("config", "types"),
    [
        ({}, set()),
        ({"rope_parameters": {"rope_type": "longrope"}}, {"longrope"}),
        ({"rope_scaling": {"type": "su"}}, {"su"}),
        ({"text_config": {"rope_parameters": {"rope_type": "llama3"}}}, {"llama3"}),
        ({"layers": [{"rope_parameters": {"rope_type": "dynamic"}}]}, {"dynamic"}),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"type": "linear"}}},
            {"longrope", "linear"},
        ),
    ],
)
def test_every_rotary_embedding_of_a_model_is_found(
    facts: ModuleType, config: dict[str, object], types: set[str]
) -> None:
    """Longrope picks its factors by the engine's context length, which must then be part of the identity."""
    assert facts._rope_types(config) == types


def test_what_an_engine_makes_of_media_is_part_of_a_model(facts: ModuleType, tmp_path: Path) -> None:
    """A4: block hashes know the bytes of a picture and what its request says, not what the engine's settings say."""

    def media(processor: str = "{}", **settings: Any) -> str:
        (tmp_path / "preprocessor_config.json").write_text(processor)
        config = {"mm_processor_kwargs": None, "media_io_kwargs": {}, "video_pruning_rate": None, **settings}
        model = SimpleNamespace(model=str(tmp_path), multimodal_config=SimpleNamespace(**config))
        return str(facts._media(model)["media"])

    assert facts._media(SimpleNamespace(multimodal_config=None)) == {}
    assert media() == media(mm_processor_kwargs={}, mm_processor_cache_gb=4)
    found = {
        media(),
        media(mm_processor_kwargs={"do_rescale": False}),
        media(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}),
        media(video_pruning_rate=0.5, video_pruning_method="evs"),
        media(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
        media('{"image_mean": [0.5, 0.5, 0.5]}'),
    }
    assert len(found) == 6


def test_two_engines_with_other_processors_have_other_fingerprints(
    world: "World", engines: "Callable[..., Engine]"
) -> None:
    """The same model and the same picture; only the command line differs."""
    from vllm.config import MultiModalConfig

    def with_processor(**settings: Any) -> "Callable[[Any], None]":
        def change(config: Any) -> None:
            config.model_config = copy.copy(config.model_config)
            config.model_config.multimodal_config = MultiModalConfig(mm_processor_kwargs=settings)

        return change

    plain, one, two = (
        engines(world, name, change=change).side.decision
        for name, change in (
            ("a", lambda _: None),
            ("b", with_processor(size=1)),
            ("c", with_processor(size=2)),
        )
    )
    assert {found.verdict.state for found in (plain, one, two)} == {"shared"}
    assert len({plain.namespace, one.namespace, two.namespace}) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"using_transformers_backend": lambda: True},
        {"model_class_overrides": {"LlamaForCausalLM": "mine:Model"}},
        {"quantization_config": {"ignore": ["lm_head"]}},
    ],
)
def test_what_the_command_line_makes_of_equal_weights_is_part_of_a_model(
    world: "World", engines: "Callable[..., Engine]", changed: dict[str, Any]
) -> None:
    """A4: another implementation of the model, another choice of layers to quantise."""

    def change(config: Any) -> None:
        config.model_config = copy.copy(config.model_config)
        vars(config.model_config).update(changed)

    one, two = engines(world, "a").side.decision, engines(world, "b", change=change).side.decision
    assert one.verdict.state == two.verdict.state == "shared"
    assert one.namespace != two.namespace


def test_accelerators_with_other_eight_bit_floats_do_not_meet(
    world: "World", engines: "Callable[..., Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4: to vLLM both caches are bytes of ``fp8``; 16-bit caches of such accelerators are those of all others."""
    from kvshare_connector import compat

    def eight_bits(config: Any) -> None:
        config.cache_config.cache_dtype = "fp8"

    found = []
    for form in ("float8_e4m3fn", "float8_e4m3fnuz"):
        monkeypatch.setattr(compat, "eight_bit_form", lambda form=form: form)
        found.append([engines(world, form, change=change).side.decision for change in (eight_bits, lambda _: None)])
    (one, plain), (two, other) = found
    assert {decision.verdict.state for decision in (one, two, plain, other)} == {"shared"}
    assert one.namespace != two.namespace
    assert plain.namespace == other.namespace


def test_an_engine_told_to_read_other_weights_is_known_by_those(facts: ModuleType, tmp_path: Path) -> None:
    """A2: equal safetensors beside them prove nothing then."""
    digests = set()
    for content in (b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(64))
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        config = SimpleNamespace(
            load_config=SimpleNamespace(load_format="pt"), weight_transfer_config=None,
            cache_config=SimpleNamespace(), model_config=SimpleNamespace(model=str(tmp_path)),
        )  # fmt: skip
        digests.add(facts.identify_weights(config))
    assert len(digests) == 2


def test_the_canary_knows_the_seed_of_this_process(facts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A5, F2: it is taken with the seed that the engine will use, set or not; random seeds give none."""
    found = {}
    for seed in (None, "7", "random"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        for algorithm in ("sha256", "sha256_cbor"):
            found[seed, algorithm] = facts.hash_canary(algorithm)
    monkeypatch.delenv("PYTHONHASHSEED")
    assert facts.hash_canary("xxhash") is None
    assert found["random", "sha256"] is found["random", "sha256_cbor"] is None
    told_apart = [found[seed, algorithm] for seed in (None, "7") for algorithm in ("sha256", "sha256_cbor")]
    assert None not in told_apart
    assert len(set(told_apart)) == 4


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"model_config": SimpleNamespace(enable_sleep_mode=True)}, "SleepMode"),
        ({"cache_config": SimpleNamespace(enable_prefix_caching=False)}, "PrefixCachingOff"),
        (
            {"speculative_config": object(), "parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
            "PipelineWithDraft",
        ),
    ],
)
def test_an_engine_that_could_not_keep_its_part_is_not_cached(
    facts: ModuleType, changed: dict[str, object], reason: str
) -> None:
    """C6, and sleep mode, after which a registered address belongs to somebody else: refused with a reason."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        speculative_config=None,
    )
    vars(config).update(changed)
    assert facts._combination_problem(config).split(":")[0] == reason
