"""Real engines with configurations that cannot share: they start, serve, and say why."""

from pathlib import Path

import pytest

from kvshare_layout.config import CONNECTOR_CLASS, CONNECTOR_MODULE
from testbed.engine import engine

pytestmark = pytest.mark.engine

SOURCE = Path(__file__).resolve().parents[2] / "connector"


def test_an_engine_with_mistakes_and_without_a_store_serves_and_names_the_mistakes(tmp_path: Path) -> None:
    """Unknown keys and malformed values isolate with a reason; the missing store costs nothing but hits."""
    extra = {"store_tp_size": "many", "colour": "blue", "master_server_address": "s:127.0.0.1:9"}
    arguments = [
        f"--kv-transfer-config.kv_connector={CONNECTOR_CLASS}",
        f"--kv-transfer-config.kv_connector_module_path={CONNECTOR_MODULE}",
        "--kv-transfer-config.kv_role=kv_both",
        "--kv-transfer-config.kv_load_failure_policy=recompute",
        *(f"--kv-transfer-config.kv_connector_extra_config.{key}={value}" for key, value in extra.items()),
    ]
    with engine(tmp_path, "mistaken", arguments=arguments, environment={"PYTHONPATH": str(SOURCE)}) as running:
        prompt = [i % 200 + 20 for i in range(200)]
        first = running.server.complete(prompt, max_tokens=8)
        assert running.server.complete(prompt, max_tokens=8).token_ids == first.token_ids
        info = next(name for name in running.server.metrics() if name.startswith("kvshare_member_info"))
        assert 'verdict="isolated"' in info
        assert 'reason="ConfigInvalid"' in info
        assert running.server.healthy()
    log = (tmp_path / "engine-mistaken.log").read_text()
    assert "store_tp_size: 'many' given" in log
    assert "colour: unknown key" in log
