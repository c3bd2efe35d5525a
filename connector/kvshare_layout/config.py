"""Config: the schema of ``kv_connector_extra_config``, one definition for the side that writes and the side that reads.

Pure parsing of plain values. Reading never raises: a mistake makes the member isolated with a reason, it never stops
an engine. Writing gives dotted command-line flags that survive shells: no quotes, braces, brackets or spaces.

Strings that a person chose carry the prefix ``s:`` on the command line, because vLLM's dotted flags parse ``null``,
``true``, ``007`` and ``80g`` as other types. Lists are written ``s:4,2`` for the same reason.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from kvshare_layout import keys

#: Roles that a pod may have in a pool, see ``kvshare.dev/role``.
ROLES = ("prefill", "decode", "both")
#: Hash algorithms whose block hashes agree between processes. xxhash and the builtin are seeded at random.
HASH_ALGORITHMS = ("sha256", "sha256_cbor")
#: Transports of the store.
PROTOCOLS = ("tcp", "rdma")
#: Physical cache layouts that vLLM knows.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
#: What proves a load: result code and byte count, or a digest behind every object as well (``objects.SEAL_BYTES``).
VERIFY_MODES = ("size", "checksum")

CONNECTOR_CLASS = "KVShareConnector"
CONNECTOR_MODULE = "kvshare_connector.connector"

_MIB = 1 << 20
# Larger numbers are mistakes, and would only fail later in somebody else's arithmetic.
_MAX_INTEGER = keys.MAX_GENERATION
_MAX_BYTES = 1 << 50


@dataclass(frozen=True)
class ConnectorConfig:
    """Configuration of one connector, every key of ``kv_connector_extra_config`` that is allowed.

    Attributes:
        store_tp_size: S as the operator or a person wrote it; None means that it must follow from the lists.
        enable_store_tp_lcm: derive S as the lcm of the listed sizes; a ``store_tp_size`` that differs is a mistake.
        prefill_tp_sizes: TP sizes of the prefill deployments.
        decode_tp_sizes: TP sizes of the decode deployments; join the lcm.
        reserved_tp_sizes: TP sizes that will be added later; join the lcm.
        pipeline_parallel_sizes: pipeline sizes of all members; empty means this pod's own size only.
        stage_boundaries: explicit inner Store stage boundaries, hidden-layer numbers.
        save_decode_cache: decode and both roles also save what they decode; without it decode saves nothing at all.
        role: ``prefill``, ``decode`` or ``both``.
        cache_namespace: pool prefix of all keys.
        model_id: the pool's name of the model, never a mount path. Informational, it is inside the prefix already.
        generation: generation of the weights. Informational, it is inside the prefix already.
        hash_algorithm: hash algorithm that the pool expects; empty accepts what the engine uses.
        block_size_tokens: block size that the pool expects; 0 accepts what the engine uses.
        master_server_address: ``host:port`` of the Mooncake master; empty reads ``MOONCAKE_CONFIG_PATH``.
        metadata_server: Mooncake's metadata server.
        protocol: ``tcp`` or ``rdma``.
        device_name: RDMA devices, comma-separated; lists for each rank of a pod are separated by slashes; empty or
            ``auto`` lets Mooncake choose for each rank.
        global_segment_size: bytes of store capacity that each rank of the engine contributes.
        local_buffer_size: bytes of Mooncake's own client buffer.
        staging_bytes: bytes of the staging arena of one rank, both directions together.
        request_layout: physical layout to ask vLLM for; empty asks for nothing.
        inside_multi_connector: MultiConnector loads the connector beside others; facts travel with the steps only.
        verify: what proves a load: ``size`` is result code and exact byte count; ``checksum`` adds a digest of bytes
            and key that is stored with every object. A member with one setting never meets members with the other.
        lookup_timeout_seconds: a lookup that takes longer counts as a miss.
        report_url: where the member reports its verdict; empty reports nowhere.
        report_ca_file: CA certificates of the report endpoint.
        report_token_file: projected service-account token.
    """

    store_tp_size: int | None = None
    enable_store_tp_lcm: bool = False
    prefill_tp_sizes: tuple[int, ...] = ()
    decode_tp_sizes: tuple[int, ...] = ()
    reserved_tp_sizes: tuple[int, ...] = ()
    pipeline_parallel_sizes: tuple[int, ...] = ()
    stage_boundaries: tuple[int, ...] = ()
    save_decode_cache: bool = False
    role: str = "both"
    cache_namespace: str = keys.DEFAULT_POOL_PREFIX
    model_id: str = ""
    generation: int = 1
    hash_algorithm: str = ""
    block_size_tokens: int = 0
    master_server_address: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    global_segment_size: int = 0
    local_buffer_size: int = 16 * _MIB
    staging_bytes: int = 256 * _MIB
    request_layout: str = ""
    inside_multi_connector: bool = False
    verify: str = "size"
    lookup_timeout_seconds: int = 5
    report_url: str = ""
    report_ca_file: str = ""
    report_token_file: str = ""

    @property
    def lcm_sizes(self) -> tuple[int, ...]:
        """All TP sizes that join the lcm."""
        return self.prefill_tp_sizes + self.decode_tp_sizes + self.reserved_tp_sizes


@dataclass(frozen=True)
class Parsed:
    """A configuration as far as it could be read, and every mistake in what could not."""

    config: ConnectorConfig
    mistakes: tuple[str, ...]


class _ExpectedError(Exception):  # its text says what was expected
    """What was expected, for the message."""


def _unprefixed(value: object) -> object:
    return value[2:] if isinstance(value, str) and value.startswith("s:") else value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _ExpectedError("a string (with the prefix s: where it looks like a number, true, false or null)")
    return str(_unprefixed(value))


def _integer(minimum: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        value = _unprefixed(value)
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_INTEGER:
            raise _ExpectedError(f"a whole number from {minimum} to {_MAX_INTEGER}")
        return value

    return read


def _switch(value: object) -> bool:
    value = _unprefixed(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _ExpectedError("true or false")


def _sizes(minimum: int) -> Callable[[object], tuple[int, ...]]:
    one = _integer(minimum)

    def read(value: object) -> tuple[int, ...]:
        value = _unprefixed(value)
        if isinstance(value, str):
            value = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
        items: Sequence[object] = value if isinstance(value, (list, tuple)) else [value]
        try:
            return tuple(one(item) for item in items)
        except _ExpectedError:
            raise _ExpectedError(f"a list of whole numbers from {minimum} up, such as [4, 2] or 4,2") from None

    return read


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _size(value: object) -> int:
    """Bytes: a number, or a number with a unit (k, Ki, KB, ... all powers of 1024, as Mooncake reads them)."""
    value = _unprefixed(value)
    if isinstance(value, str) and (m := re.fullmatch(r"(\d{1,15})\s*([kmgt]?)(i?b?)", value.strip().lower())):
        value = int(m[1]) * _UNITS[m[2]]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_BYTES:
        raise _ExpectedError("a number of bytes below 1 PiB, with or without a unit such as 256Mi or 4gb")
    return value


def _choice(allowed: Sequence[str], *, empty: bool = False) -> Callable[[object], str]:
    def read(value: object) -> str:
        text = _text(value)
        for option in allowed:
            if text.lower() == option.lower():
                return option
        if empty and not text:
            return ""
        raise _ExpectedError("one of " + ", ".join(allowed))

    return read


def _prefix(value: object) -> str:
    text = _text(value).rstrip("/")
    if not keys.is_pool_prefix(text):
        raise _ExpectedError("kvs1/p-NAME/gNUMBER")
    return text


_READERS: dict[str, Callable[[object], object]] = {
    "store_tp_size": _integer(1),
    "enable_store_tp_lcm": _switch,
    "prefill_tp_sizes": _sizes(1),
    "decode_tp_sizes": _sizes(1),
    "reserved_tp_sizes": _sizes(1),
    "pipeline_parallel_sizes": _sizes(1),
    "stage_boundaries": _sizes(0),
    "save_decode_cache": _switch,
    "role": _choice(ROLES),
    "cache_namespace": _prefix,
    "model_id": _text,
    "generation": _integer(1),
    "hash_algorithm": _choice(HASH_ALGORITHMS, empty=True),
    "block_size_tokens": _integer(0),
    "master_server_address": _text,
    "metadata_server": _text,
    "protocol": _choice(PROTOCOLS),
    "device_name": _text,
    "global_segment_size": _size,
    "local_buffer_size": _size,
    "staging_bytes": _size,
    "request_layout": _choice(LAYOUTS, empty=True),
    "inside_multi_connector": _switch,
    "verify": _choice(VERIFY_MODES),
    "lookup_timeout_seconds": _integer(1),
    "report_url": _text,
    "report_ca_file": _text,
    "report_token_file": _text,
}

_PLAIN_STRINGS = frozenset({"role", "hash_algorithm", "protocol", "request_layout", "verify"})


def parse(raw: Mapping[str, object] | None) -> Parsed:
    """Read ``kv_connector_extra_config``; unknown keys and malformed values become mistakes, never exceptions."""
    mistakes: list[str] = []
    values: dict[str, object] = {}
    if raw is not None and not isinstance(raw, Mapping):
        mistakes.append(f"kv_connector_extra_config: {raw!r} given, an object of keys and values expected: correct it")
        raw = None
    for key, value in (raw or {}).items():
        reader = _READERS.get(key)
        if reader is None:
            mistakes.append(f"{key}: unknown key, one of {', '.join(sorted(_READERS))} expected: remove or correct it")
            continue
        if value is None:
            continue
        try:
            values[key] = reader(value)
        except _ExpectedError as expected:
            mistakes.append(f"{key}: {value!r} given, {expected} expected: correct it")
    config = ConnectorConfig(**values)  # type: ignore[arg-type]
    if config.enable_store_tp_lcm and not config.prefill_tp_sizes:
        mistakes.append("prefill_tp_sizes: nothing given, the sizes for enable_store_tp_lcm expected: list them")
    return Parsed(config, tuple(mistakes))


def to_extra_config(config: ConnectorConfig) -> dict[str, object]:
    """The keys of ``kv_connector_extra_config`` that differ from the defaults, as ``parse`` reads them back."""
    default = ConnectorConfig()
    out: dict[str, object] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if value == getattr(default, field.name):
            continue
        if isinstance(value, tuple):
            value = "s:" + ",".join(str(item) for item in value)
        elif isinstance(value, str) and field.name not in _PLAIN_STRINGS:
            value = f"s:{value}"
        out[field.name] = value
    return out


def to_dotted_flags(config: ConnectorConfig, *, kv_role: str, flag: str = "--kv-transfer-config") -> tuple[str, ...]:
    """The command-line arguments that make vLLM load the connector with ``config``, one token each.

    ``kv_load_failure_policy=recompute`` is always among them: losing the store must cost time, not answers.

    Raises:
        ValueError: a value holds a character that a shell would tear (white space, quotes, braces, ``$`` and the like).
    """
    settings: dict[str, object] = {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
    }
    for key, value in to_extra_config(config).items():
        settings[f"kv_connector_extra_config.{key}"] = str(value).lower() if isinstance(value, bool) else value
    flags = tuple(f"{flag}.{key}={value}" for key, value in settings.items())
    torn = [f for f in flags if not re.fullmatch(r"[A-Za-z0-9_.,:/=@%+\-\[\]]+", f)]
    if torn:
        raise ValueError(f"{torn} given, values without white space, quotes, braces and shell characters expected")
    return flags


def kv_role_of(role: str) -> str:
    """vLLM's ``kv_role`` for a pool role. ``decode`` is a consumer; the connector itself decides what it saves."""
    return "kv_consumer" if role == "decode" else "kv_both"
