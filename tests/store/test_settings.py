"""Where a client's settings come from, and what the process's environment gets."""

import json
import socket
import time
from pathlib import Path

import pytest

from kvshare_connector.store.protocol import StoreUnavailable
from kvshare_connector.store.settings import (
    CONFIG_PATH,
    StoreSettings,
    environment,
    local_hostname,
    reachable,
    set_environment,
    settings_from,
)
from kvshare_layout.config import ConnectorConfig


def _file(folder: Path, data: object) -> dict[str, str]:
    path = folder / "mooncake.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return {CONFIG_PATH: str(path)}


def test_our_own_keys_come_first(tmp_path: Path) -> None:
    """A configured master is used, whatever file there is."""
    config = ConnectorConfig(master_server_address="m:1", protocol="rdma", device_name="auto", global_segment_size=7)
    environ = _file(tmp_path, {"master_server_address": "other:2"})
    assert settings_from(config, environ) == StoreSettings("m:1", protocol="rdma", segment_bytes=7)
    assert settings_from(config, environ).metadata_only().segment_bytes == 0


def test_each_rank_gets_its_own_devices_where_they_are_listed_for_each() -> None:
    """Slashes between ranks, commas between devices of one; a ninth rank is the first of the next machine."""
    config = ConnectorConfig(master_server_address="m:1", protocol="rdma", device_name="a,b/c/auto")
    assert [settings_from(config, {}, rank).device for rank in range(4)] == ["a,b", "c", "", "a,b"]
    everybody = ConnectorConfig(master_server_address="m:1", protocol="rdma", device_name="a,b")
    assert [settings_from(everybody, {}, rank).device for rank in range(2)] == ["a,b", "a,b"]


def test_without_keys_the_file_of_vllm_is_read(tmp_path: Path) -> None:
    """In vLLM's documented form, with units."""
    data = {
        "metadata_server": "http://m:8080/metadata",
        "master_server_address": "m:50051",
        "protocol": "tcp",
        "device_name": "mlx5_0",
        "mode": "embedded",
        "global_segment_size": "1.5GB",
        "local_buffer_size": 1 << 26,
        "tenant_id": "team",
        "enable_offload": False,
    }
    assert settings_from(ConnectorConfig(), _file(tmp_path, data)) == StoreSettings(
        "m:50051", "http://m:8080/metadata", "tcp", "mlx5_0", 3 << 29, 1 << 26, tenant="team"
    )


def test_the_file_has_the_defaults_of_vllm(tmp_path: Path) -> None:
    """Compared with vLLM's own reader, but for the buffer, which our transfers do not use."""
    store = pytest.importorskip("vllm.distributed.mooncake_store")
    for extra in ({}, {"mode": "standalone-store", "global_segment_size": 0}, {"global_segment_size": "80mb"}):
        data = {"master_server_address": "m:1", "metadata_server": "P2PHANDSHAKE", **extra}
        environ = _file(tmp_path, data)
        theirs = store.MooncakeStoreConfig.from_file(environ[CONFIG_PATH])
        ours = settings_from(ConnectorConfig(), environ)
        assert (ours.master, ours.protocol, ours.device, ours.segment_bytes, ours.tenant) == (
            theirs.master_server_address,
            theirs.protocol,
            theirs.device_name,
            theirs.global_segment_size,
            theirs.tenant_id,
        )


def test_no_master_anywhere_says_what_to_set() -> None:
    """Both places are named."""
    with pytest.raises(StoreUnavailable, match=r"master_server_address.*MOONCAKE_CONFIG_PATH"):
        settings_from(ConnectorConfig(), {})


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    """Wrong mode, size, protocol and a missing master."""
    data = {"mode": "both", "global_segment_size": "lots", "protocol": 3}
    with pytest.raises(StoreUnavailable) as error:
        settings_from(ConnectorConfig(), _file(tmp_path, data))
    for name in ("mode", "global_segment_size", "protocol", "master_server_address"):
        assert f"{name}: " in str(error.value)


@pytest.mark.parametrize("data", ["", "[1]", "{", "null", "\0"])
def test_files_that_are_no_object_are_refused(tmp_path: Path, data: str) -> None:
    """The path is in the text."""
    with pytest.raises(StoreUnavailable, match=r"mooncake\.json"):
        settings_from(ConnectorConfig(), _file(tmp_path, data))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The cause is chained."""
    with pytest.raises(StoreUnavailable, match="no-such-file") as error:
        settings_from(ConnectorConfig(), {CONFIG_PATH: str(tmp_path / "no-such-file")})
    assert isinstance(error.value.__cause__, OSError)


def test_the_environment_gets_what_nobody_has_set() -> None:
    """What a person has set stays."""
    environ = {"MC_RPC_TIMEOUT_MS": "9000"}
    set_environment(StoreSettings("m:1"), environ)
    assert environ["MC_RPC_TIMEOUT_MS"] == "9000"
    assert environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"
    assert environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"
    assert "MC_FORCE_HCA" not in environ


def test_rdma_never_falls_back_silently() -> None:
    """Mooncake would use TCP without a word."""
    assert environment(StoreSettings("m:1", protocol="rdma"))["MC_FORCE_HCA"] == "1"


@pytest.mark.parametrize(
    "master",
    ["127.0.0.1:50051", "localhost:1", "127.0.0.1", "etcd://127.0.0.1:2379;127.0.0.1:2380", "no-such-host.invalid:1"],
)
def test_a_master_on_loopback_is_reached_from_loopback(master: str) -> None:
    """Also when its name does not resolve: there is nothing better to say."""
    assert local_hostname(master) in ("127.0.0.1", "::1")


@pytest.mark.parametrize("master", ["", ":", "[::1]:5", "a:b:c", "etcd://", "x:99999", "[", "1.2.3.4:5"])
def test_any_text_gives_an_address(master: str) -> None:
    """Malformed addresses fail later, at the master, with a message."""
    assert local_hostname(master)


def test_a_master_is_reachable_at_any_of_its_addresses() -> None:
    """A replicated store is named by several."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"127.0.0.1:{port}", 0)
        assert reachable(f"etcd://127.0.0.1:1;127.0.0.1:{port}", 0)


@pytest.mark.parametrize("master", ["127.0.0.1:1", "no-such-host.invalid:1", "", "etcd://127.0.0.1:1;127.0.0.1:2"])
def test_waiting_for_a_master_is_bounded(master: str) -> None:
    """Nobody listens, or the name does not resolve."""
    started = time.monotonic()
    assert not reachable(master, 0.3)
    assert time.monotonic() - started < 10
