"""Settings: what a Mooncake client is started with, from our configuration or from vLLM's own Mooncake file.

May live here: the frozen settings, their sources and the environment variables that follow from them. Nothing here
imports Mooncake or opens a connection that carries data.
"""

import json
import os
import re
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from kvshare_connector.store.batches import LANES
from kvshare_connector.store.protocol import StoreUnavailable
from kvshare_layout.config import ConnectorConfig

#: Names the file with the store's settings, in the form that vLLM documents for its own Mooncake connectors.
CONFIG_PATH = "MOONCAKE_CONFIG_PATH"

_GIB = 1 << 30
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class StoreSettings:
    """Everything that a client needs.

    Attributes:
        master: ``host:port`` of the master, an IPv6 literal in brackets, or ``etcd://host:port;...``.
        metadata_server: ``P2PHANDSHAKE`` or an address of a metadata server.
        protocol: ``tcp`` or ``rdma``.
        device: RDMA devices, comma-separated; empty lets Mooncake choose.
        segment_bytes: capacity that this client contributes to the store; 0 for a pure client.
        buffer_bytes: Mooncake's own buffer, used for small objects only.
        hostname: address under which others reach this process; empty finds the one that leads to the master.
        tenant: tenant on a master with tenants; ``default`` otherwise.
        setup_seconds: how long to wait for somebody to listen at the master's address.
    """

    master: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 16 << 20
    hostname: str = ""
    tenant: str = "default"
    setup_seconds: float = 10.0

    def metadata_only(self) -> "StoreSettings":
        """The same store for a client that only asks: it contributes no capacity."""
        return replace(self, segment_bytes=0)


def settings_from(
    config: ConnectorConfig, environ: Mapping[str, str] | None = None, local_rank: int = 0
) -> StoreSettings:
    """Settings of a connector: from its own keys, or from the file that ``MOONCAKE_CONFIG_PATH`` names.

    ``local_rank`` counts the ranks of this pod; it picks the rank's own list where devices are listed for each rank.

    Raises:
        StoreUnavailable: neither names a master, or the file has mistakes, all of them in the text.
    """
    if config.master_server_address:
        return StoreSettings(
            master=config.master_server_address,
            metadata_server=config.metadata_server,
            protocol=config.protocol,
            device=_device(config.device_name, local_rank),
            segment_bytes=config.global_segment_size,
            buffer_bytes=config.local_buffer_size,
        )
    path = (os.environ if environ is None else environ).get(CONFIG_PATH, "")
    if not path:
        raise StoreUnavailable(
            f"no Mooncake master given, master_server_address in kv_connector_extra_config or a file named by "
            f"{CONFIG_PATH} expected: set one of them"
        )
    return settings_from_file(path)


def settings_from_file(path: str) -> StoreSettings:
    """Settings from a file in vLLM's form, with vLLM's own defaults for what it does not say.

    A file without ``mode`` means ``embedded``: every client contributes ``global_segment_size``, 4 GiB by default.

    Raises:
        StoreUnavailable: the file cannot be read, or with every mistake in it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        raise StoreUnavailable(f"{CONFIG_PATH} names {path}, a readable JSON file expected: {error}") from error
    if not isinstance(data, dict):
        raise StoreUnavailable(f"{CONFIG_PATH} names {path}, a JSON object in it expected")
    mistakes: list[str] = []

    def text(key: str, default: str, allowed: tuple[str, ...] = ()) -> str:
        value = data.get(key, default)
        value = default if value is None else value
        if not isinstance(value, str) or (allowed and value not in allowed):
            mistakes.append(f"{key}: {value!r} given, {' or '.join(allowed) or 'a string'} expected")
            return default
        return value.strip()

    def size(key: str, default: int) -> int:
        value = _size(data.get(key, default))
        if value is None:
            mistakes.append(f"{key}: {data[key]!r} given, bytes or a text such as 4GB expected")
        return default if value is None else value

    embedded = text("mode", "embedded", ("embedded", "standalone-store")) == "embedded"
    segment = size("global_segment_size", 4 * _GIB if embedded else 0)
    if embedded and not segment:
        mistakes.append("global_segment_size: 0 given, a size expected in mode embedded: or use mode standalone-store")
    if not embedded and segment:
        mistakes.append("global_segment_size: a size given, 0 expected in mode standalone-store")
    master = text("master_server_address", "")
    if not master:
        mistakes.append("master_server_address: nothing given, host:port expected")
    settings = StoreSettings(
        master=master,
        metadata_server=text("metadata_server", "P2PHANDSHAKE") or "P2PHANDSHAKE",
        protocol=text("protocol", "rdma", ("tcp", "rdma")),
        device=_device(text("device_name", "")),
        segment_bytes=segment,
        buffer_bytes=size("local_buffer_size", StoreSettings.buffer_bytes),
        tenant=text("tenant_id", "default") or "default",
    )
    if mistakes:
        raise StoreUnavailable(f"{CONFIG_PATH} names {path} with mistakes: {'; '.join(mistakes)}")
    return settings


def _device(name: str, local_rank: int = 0) -> str:
    """The devices of one rank; more ranks than lists begin again with the first, as on a second machine."""
    lists = name.split("/")
    name = lists[local_rank % len(lists)]
    return "" if name.lower() == "auto" else name


def _size(value: object) -> int | None:
    if isinstance(value, str) and (
        found := re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(gb|mb|kb|b)?\s*", value, re.I)
    ):
        factor = {"gb": _GIB, "mb": 1 << 20, "kb": 1 << 10}.get((found[2] or "b").lower(), 1)
        return int(float(found[1]) * factor)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def environment(settings: StoreSettings) -> dict[str, str]:
    """The environment variables that Mooncake reads when a client is made, and the values that a cache needs.

    The default queue limits wedge a client for good at about 2,048 segments in flight. The default timeouts (30 s) let
    one hung node age out the leases of everything else in a batch; 4 s is below half a lease of 10 s. Each segment in
    flight has a connection to itself, so that no timeout waits for another.
    """
    variables = {
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
        "MC_TCP_LANES_PER_PEER": str(LANES),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "4",
        "MC_TCP_STATUS_TIMEOUT_SEC": "4",
        "MC_RPC_TIMEOUT_MS": "4000",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "WARNING",
        "MC_YLT_LOG_LEVEL": "ERROR",
    }
    if settings.protocol == "rdma":
        # Without it a missing device falls back to TCP without a word.
        variables["MC_FORCE_HCA"] = "1"
    return variables


def set_environment(settings: StoreSettings, environ: MutableMapping[str, str] | None = None) -> None:
    """Set those variables that nobody has set."""
    target = os.environ if environ is None else environ
    for name, value in environment(settings).items():
        target.setdefault(name, value)


def local_hostname(master: str) -> str:
    """The address of this machine that leads to ``master``, which is the one that the store's nodes can reach too.

    No packet is sent. Falls back to loopback when there is no route.
    """
    host, port = _endpoints(master)[0]
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return _LOOPBACK


def reachable(master: str, seconds: float) -> bool:
    """Whether somebody listens at one of the addresses in ``master`` within ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        for address in _endpoints(master):
            try:
                with socket.create_connection(address, timeout=max(0.1, min(2.0, seconds))):
                    return True
            except OSError:
                continue
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)


def _endpoints(master: str) -> list[tuple[str, int]]:
    """Hosts and ports in ``master``; loopback and a port that nobody uses when none can be read."""
    out: list[tuple[str, int]] = []
    for text in re.split(r"[;,]", master.partition("://")[2] or master):
        found = re.fullmatch(r"\s*(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>\d{1,5}))?\s*", text)
        if found is not None and 0 < (port := int(found["port"] or 1)) < 65536:
            out.append((found["v6"] or found["host"], port))
    return out or [(_LOOPBACK, 1)]
