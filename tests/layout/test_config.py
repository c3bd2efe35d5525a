"""Config: what the operator writes is what the connector reads, through vLLM's own parser, and nothing raises."""

import json
import string
from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout import keys
from kvshare_layout.config import (
    HASH_ALGORITHMS,
    LAYOUTS,
    PROTOCOLS,
    ROLES,
    ConnectorConfig,
    kv_role_of,
    parse,
    to_dotted_flags,
    to_extra_config,
)

#: Texts that vLLM's dotted flags take for something else.
STRANGE = [
    "null", "true", "False", "007", "80g", "1e5", "-1", "NaN", "Infinity", "[1,2]", "4,2", "s:", "s:s:x", "a=b", "=",
    "+1", "0x10", "1_000", "http://x.y:1/z", "--tp=2", "-tp", "%41", "@x", "None", "0", "1.50", "a.b.c", "[",
    "kv+",
]  # fmt: skip
shell_safe = st.text(string.ascii_letters + string.digits + "_.,:/=@%+-[]", max_size=20)
texts = st.sampled_from(STRANGE) | shell_safe
sizes = st.lists(st.integers(1, 256), max_size=4).map(tuple)

configs = st.builds(
    ConnectorConfig,
    store_tp_size=st.none() | st.integers(1, 256),
    enable_store_tp_lcm=st.just(False),
    prefill_tp_sizes=sizes,
    decode_tp_sizes=sizes,
    reserved_tp_sizes=sizes,
    pipeline_parallel_sizes=sizes,
    stage_boundaries=st.lists(st.integers(0, 99), max_size=4).map(tuple),
    save_decode_cache=st.booleans(),
    inside_multi_connector=st.booleans(),
    role=st.sampled_from(ROLES),
    cache_namespace=st.sampled_from([keys.DEFAULT_POOL_PREFIX, "kvs1/p-0123456789ab/g7"]),
    model_id=texts,
    generation=st.integers(1, 99),
    hash_algorithm=st.sampled_from(("", *HASH_ALGORITHMS)),
    block_size_tokens=st.integers(0, 256),
    master_server_address=texts,
    metadata_server=texts,
    protocol=st.sampled_from(PROTOCOLS),
    device_name=texts,
    global_segment_size=st.integers(0, 1 << 50),
    local_buffer_size=st.integers(0, 1 << 50),
    staging_bytes=st.integers(0, 1 << 50),
    request_layout=st.sampled_from(("", *LAYOUTS)),
    lookup_timeout_seconds=st.integers(1, 60),
    report_url=texts,
    report_ca_file=texts,
    report_token_file=texts,
)

Parser = Callable[[list[str]], dict[str, object]]


@pytest.fixture(scope="module")
def vllm_parser() -> Parser:
    """vLLM's own command-line parser, with its own action for the flag."""
    module = pytest.importorskip("vllm.utils.argparse_utils")

    def read(flags: list[str]) -> dict[str, object]:
        parser = module.FlexibleArgumentParser()
        parser.add_argument("--kv-transfer-config", type=json.loads)
        parser.add_argument("--port", type=int)
        found: dict[str, object] = parser.parse_args(flags).kv_transfer_config
        return found

    return read


@given(configs)
def test_what_is_written_is_read_back(config: ConnectorConfig) -> None:
    """As a dictionary, and after a journey through JSON."""
    raw = to_extra_config(config)
    assert parse(raw) == parse(json.loads(json.dumps(raw)))
    assert parse(raw).config == config
    assert parse(raw).mistakes == ()


@given(config=configs)
def test_flags_survive_vllms_parser(vllm_parser: Parser, config: ConnectorConfig) -> None:
    """Strange texts included; other flags around them do not matter."""
    flags = to_dotted_flags(config, kv_role="kv_both")
    read = vllm_parser(["--port", "1", *flags])
    extra = read.pop("kv_connector_extra_config", {})
    assert isinstance(extra, dict)
    assert parse(extra).mistakes == ()
    assert parse(extra).config == config
    assert read == {
        "kv_connector": "KVShareConnector",
        "kv_connector_module_path": "kvshare_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


@pytest.mark.parametrize("text", STRANGE)
def test_each_strange_text_survives_vllms_parser(vllm_parser: Parser, text: str) -> None:
    """One by one, so that a failure names it."""
    config = ConnectorConfig(model_id=text, device_name=text)
    extra = vllm_parser(list(to_dotted_flags(config, kv_role="kv_consumer")))["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert parse(extra).config == config


@given(configs)
def test_flags_are_single_safe_tokens(config: ConnectorConfig) -> None:
    """No shell changes them."""
    for flag in to_dotted_flags(config, kv_role="kv_both"):
        assert not set(flag) & set(" \t\n'\"{}$`\\|&;<>()*?!#~^")


@pytest.mark.parametrize(
    "text", ["a b", 'a"b', "a'b", "$HOME", "`x`", "{a}", "a\nb", "ä", "a;b", "a*", "~", "#x", "\\"]
)
def test_texts_that_a_shell_would_tear_are_refused(text: str) -> None:
    """The operator then refuses the pool, before a pod is touched."""
    with pytest.raises(ValueError, match="given, values without"):
        to_dotted_flags(ConnectorConfig(model_id=text), kv_role="kv_both")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([field.name for field in fields(ConnectorConfig)])


@given(st.dictionaries(names | st.text(max_size=8), anything, max_size=6))
def test_nothing_that_is_given_raises(raw: dict[str, object]) -> None:
    """Every value is taken or named as a mistake; what is taken has the field's type and bounds."""
    result = parse(raw)
    default = ConnectorConfig()
    for field in fields(ConnectorConfig):
        value = getattr(result.config, field.name)
        expected = getattr(default, field.name)
        assert value == expected or field.name in raw
        assert isinstance(value, (int, type(None)) if expected is None else type(expected))
    for key in raw:
        if key not in {field.name for field in fields(ConnectorConfig)}:
            assert any(mistake.startswith(f"{key}: unknown key") for mistake in result.mistakes)
    assert parse(to_extra_config(result.config)).config == result.config


@pytest.mark.parametrize("raw", [[], "text", 7, [("a", 1)], True, 0.5])
def test_a_configuration_that_is_no_object_is_a_mistake(raw: object) -> None:
    """And no exception."""
    result = parse(raw)  # type: ignore[arg-type]
    assert result.config == ConnectorConfig()
    assert "an object of keys and values expected" in result.mistakes[0]


MISTAKES: dict[str, tuple[object, str]] = {
    "store_tp_size": (0, "a whole number from 1"),
    "enable_store_tp_lcm": (1, "true or false"),
    "prefill_tp_sizes": ([4, 0], "a list of whole numbers from 1 up"),
    "decode_tp_sizes": ("4;2", "a list of whole numbers from 1 up"),
    "reserved_tp_sizes": (True, "a list of whole numbers from 1 up"),
    "pipeline_parallel_sizes": ([1.5], "a list of whole numbers from 1 up"),
    "stage_boundaries": (["-1"], "a list of whole numbers from 0 up"),
    "save_decode_cache": ("yes", "true or false"),
    "inside_multi_connector": ("yes", "true or false"),
    "role": ("reader", "one of prefill, decode, both"),
    "cache_namespace": ("mine", "kvs1/p-NAME/gNUMBER"),
    "model_id": (7, "a string (with the prefix s:"),
    "generation": (0, "a whole number from 1"),
    "hash_algorithm": ("xxhash", "one of sha256, sha256_cbor"),
    "block_size_tokens": (16.0, "a whole number from 0"),
    "master_server_address": (False, "a string"),
    "metadata_server": ([], "a string"),
    "protocol": ("udp", "one of tcp, rdma"),
    "device_name": (0, "a string"),
    "global_segment_size": ("many", "a number of bytes"),
    "local_buffer_size": (-1, "a number of bytes"),
    "staging_bytes": (1 << 60, "a number of bytes below 1 PiB"),
    "request_layout": ("HND", "one of LBHNC"),
    "verify": ("hash", "one of size"),
    "lookup_timeout_seconds": (10**30, "a whole number from 1"),
    "report_url": ({}, "a string"),
    "report_ca_file": (1, "a string"),
    "report_token_file": (1.0, "a string"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(ConnectorConfig)])
def test_every_key_names_its_mistake(name: str) -> None:
    """What was given, what was expected, what to do; the field keeps its default."""
    value, expected = MISTAKES[name]
    result = parse({name: value})
    (mistake,) = result.mistakes
    assert mistake.startswith(f"{name}: {value!r} given, {expected}")
    assert mistake.endswith(" expected: correct it")
    assert result.config == ConnectorConfig()


def test_all_mistakes_are_named_at_once() -> None:
    """Unknown keys too."""
    result = parse({"store_tp_size": "x", "role": "y", "storetp": 4, "protocol": "tcp"})
    assert [mistake.split(":")[0] for mistake in result.mistakes] == ["store_tp_size", "role", "storetp"]


def test_the_original_proposals_keys_are_read() -> None:
    """As JSON has them and as dotted flags give them."""
    for sizes_given in ([4, 2], "4,2", "[4, 2]", "s:4,2"):
        result = parse({"enable_store_tp_lcm": True, "prefill_tp_sizes": sizes_given, "save_decode_cache": "true"})
        assert result.mistakes == ()
        assert result.config.prefill_tp_sizes == (4, 2)
        assert result.config.save_decode_cache
    assert parse({"prefill_tp_sizes": 4}).config.prefill_tp_sizes == (4,)


def test_the_lcm_without_sizes_is_a_mistake() -> None:
    """Nothing to derive it from."""
    assert "prefill_tp_sizes" in parse({"enable_store_tp_lcm": True}).mistakes[0]


@pytest.mark.parametrize(
    ("text", "size"), [("256Mi", 256 << 20), ("4gb", 4 << 30), ("1 KiB", 1024), ("7", 7), ("0", 0), ("s:2T", 2 << 40)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    """All of them powers of 1024, as Mooncake reads them."""
    assert parse({"staging_bytes": text}).config.staging_bytes == size


def test_a_decode_pod_is_a_consumer() -> None:
    """vLLM's own role; what is saved the connector decides."""
    assert {role: kv_role_of(role) for role in ROLES} == {
        "prefill": "kv_both",
        "both": "kv_both",
        "decode": "kv_consumer",
    }
