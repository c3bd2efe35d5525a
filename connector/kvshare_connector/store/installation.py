"""Installation: the only file that imports Mooncake; finds out whether it can be used, and sets a client up.

May live here: what is needed of the module, the sentence that says what is missing, one attempt at a set-up.
"""

import importlib
import importlib.metadata
from typing import Any

from kvshare_connector.store import codes, held
from kvshare_connector.store.protocol import StoreUnavailable
from kvshare_connector.store.settings import StoreSettings, local_hostname, reachable

NEEDED = "mooncake-transfer-engine 0.3.13 or newer"
_METHODS = (
    "batch_get_into_multi_buffers", "batch_get_replica_desc", "batch_is_exist", "batch_put_from_multi_buffers",
    "batch_remove", "close", "get", "put", "register_buffer", "remove_by_regex", "setup", "unregister_buffer",
    *held.METHODS,
)  # fmt: skip


def installed() -> str:
    """Name and version of the installed Mooncake distribution, or ``nothing``."""
    try:
        names = importlib.metadata.packages_distributions().get("mooncake", [])
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in dict.fromkeys(names)) or "nothing"
    except importlib.metadata.PackageNotFoundError:
        return "nothing"


def library() -> Any:
    """Mooncake's store module.

    Raises:
        StoreUnavailable: missing, cannot be loaded, or lacks a method that is needed.
    """
    try:
        module = importlib.import_module("mooncake.store")
        client = module.MooncakeDistributedStore
        lacking = [name for name in _METHODS if not hasattr(client, name)]
        config = module.ReplicateConfig
    except Exception as error:  # a native module may fail in any way, and none may stop an engine
        raise StoreUnavailable(
            f"{installed()} installed, {NEEDED} needed: install it in the image ({type(error).__name__}: {error})"
        ) from error
    if lacking or config is None:
        raise StoreUnavailable(f"{installed()} installed without {', '.join(lacking)}, {NEEDED} needed: upgrade it")
    return module


def library_problem() -> str:
    """Why Mooncake cannot be used in this image, one sentence, or an empty string."""
    try:
        library()
    except StoreUnavailable as error:
        return str(error)
    return ""


def set_up(module: Any, settings: StoreSettings) -> Any:
    """A client that is ready.

    Mooncake holds the interpreter lock during ``setup``, 4 s for every attempt at a master that does not answer. So the
    master's port is awaited here first, where other threads go on, and Mooncake gets one attempt.

    Raises:
        StoreUnavailable: nobody listens at the master's address, or Mooncake refused.
    """
    if not reachable(settings.master, settings.setup_seconds):
        answer = f"no connection in {settings.setup_seconds:g} s"
    else:
        raw = module.MooncakeDistributedStore()
        tenant = {} if settings.tenant == "default" else {"tenant_id": settings.tenant}
        try:
            code = raw.setup(
                settings.hostname or local_hostname(settings.master),
                settings.metadata_server,
                settings.segment_bytes,
                settings.buffer_bytes,
                settings.protocol,
                settings.device,
                settings.master,
                **tenant,
            )
            if code == codes.OK:
                return raw
            answer = f"code {code} ({codes.explain(code).name})"
        except Exception as error:  # wrong types for the native call
            answer = f"{type(error).__name__}: {error}"
    raise StoreUnavailable(
        f"Mooncake master {settings.master} over {settings.protocol} given, a master that answers and a device for "
        f"{settings.protocol} expected, got {answer}: check the address, the network and the device"
    )
