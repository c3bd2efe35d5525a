"""A second connector for MultiConnector: it claims hits as told, loads when told, and proves nothing.

Like vLLM's NixlConnector it has a handshake of its own and raises at any other; unlike it, its loads always fail, so
that whatever it leaves in a cache is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class OtherHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Nothing but its type."""


@dataclass
class OtherMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Loads to start: request and blocks."""

    loads: dict[str, list[int]] = field(default_factory=dict)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module; ``hits``, ``finishing`` and ``synchronous`` (loads in the step that needs them) are for tests."""

    hits: Mapping[str, int] = {}
    finishing = True
    synchronous = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._planned: dict[str, list[int]] = {}
        self._loading: dict[str, list[int]] = {}
        self._asked: set[str] = set()
        self._failed: set[int] = set()
        self._groups = len(kv_cache_config.kv_cache_groups)

    def get_handshake_metadata(self) -> OtherHandshake:
        """Its own."""
        return OtherHandshake()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        """Raises ValueError at a handshake of another connector, as NixlConnector does."""
        if not all(isinstance(item, OtherHandshake) for item in metadata.values()):
            raise ValueError(f"OtherHandshake expected, {metadata} given")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """As told, once per request."""
        if request.request_id in self._asked:
            return 0, False
        hit = self.hits.get(request.request_id, 0) - num_computed_tokens
        return (hit, not self.synchronous) if hit > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load."""
        if num_external_tokens:
            self._asked.add(request.request_id)
            self._planned[request.request_id] = list(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        """The planned loads."""
        planned, self._planned = self._planned, {}
        return OtherMetadata(planned)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Remember what is to be loaded."""
        self._loading.update(self._get_connector_metadata().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """All loads are over, and have failed, as soon as that is allowed."""
        results = KVConnectorTransferResults()
        if self.finishing:
            results.finished_recving.update(self._loading)
            if self._groups > 1:  # then vLLM wants to hear of requests, not of blocks
                results.failed_recving.update(self._loading)
            else:
                self._failed.update(*self._loading.values())
            self._loading = {}
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Each failed block once."""
        taken, self._failed = self._failed, set()
        return taken

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Keeps nothing."""
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Keeps nothing."""
        return False, None
