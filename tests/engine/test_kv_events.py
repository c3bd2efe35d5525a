"""A real engine that publishes KV events over a socket: routers outside hear what the store holds."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from testbed import mooncake
from testbed.engine import engine
from testbed.ports import free_ports
from testbed.sharing import BLOCK, ENVIRONMENT, connector_flags, settle, text

pytestmark = pytest.mark.engine

PROMPT_BLOCKS = 10


class Listener:
    """Subscribes to an engine's events and decodes them as any subscriber would."""

    def __init__(self, port: int) -> None:
        import zmq

        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.events: list[Any] = []

    def wait_for(self, blocks: int, medium: str) -> list[Any]:
        """The stored events of a medium, once they tell of ``blocks`` blocks."""
        import msgspec
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        deadline = time.monotonic() + 60
        while True:
            found = [e for e in self.events if isinstance(e, BlockStored) and e.medium == medium]
            if sum(len(event.block_hashes) for event in found) >= blocks:
                return found
            assert time.monotonic() < deadline, self.events
            if self._socket.poll(1000):
                _, _, payload = self._socket.recv_multipart()
                self.events += msgspec.msgpack.decode(payload, type=KVEventBatch).events

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(linger=0)


def test_subscribers_hear_of_blocks_in_the_store_as_of_the_engines_own(tmp_path: Path) -> None:
    """E7: two ranks save a prompt; one event for its blocks, with the hashes and tokens of the engine's own event."""
    (port,) = free_ports(1)
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    prompt = text(1, PROMPT_BLOCKS * BLOCK)
    with mooncake.store(tmp_path) as store:
        flags = [*connector_flags(store, store_tp=2), f"--kv-events-config={json.dumps(publish)}"]
        with engine(
            tmp_path,
            "publishing",
            tp=2,
            layout="NHD",
            reference_attention=True,
            environment=ENVIRONMENT,
            arguments=flags,
        ) as running:
            listener = Listener(port)
            try:
                time.sleep(4)  # a subscription takes a moment, and says nothing when it is there
                running.server.complete(prompt, max_tokens=1)
                settle(store, PROMPT_BLOCKS * 2)
                stored = listener.wait_for(PROMPT_BLOCKS, "STORAGE")
                own = listener.wait_for(PROMPT_BLOCKS, "GPU")
            finally:
                listener.close()
    for name in ("block_hashes", "token_ids"):
        assert [v for event in stored for v in getattr(event, name)] == [
            v for event in own for v in getattr(event, name)
        ]
    assert [v for event in stored for v in event.token_ids] == prompt
    assert {(event.locality, event.ownership) for event in stored} == {("REMOTE", "kvshare")}
