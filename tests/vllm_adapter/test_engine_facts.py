"""Facts of the engine: what the model's configuration says about the bytes of a cache."""

import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


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
    ],
)
def test_every_rotary_embedding_of_a_model_is_found(
    facts: ModuleType, config: dict[str, object], types: set[str]
) -> None:
    """Longrope picks its factors by the engine's context length, which must then be part of the identity."""
    assert facts._rope_types(config) == types


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
