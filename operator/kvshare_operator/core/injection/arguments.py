"""The flags that a member gets.

Why this exists: the operator writes what the connector reads, so both go through ``kvshare_layout.config``.
Every flag is one word without quotes, blanks or braces, so that shells cannot tear it.
"""

from __future__ import annotations

from kvshare_layout import config
from kvshare_operator.api import names
from kvshare_operator.core.commandline.flags import Arguments
from kvshare_operator.core.injection.settings import InjectionSettings
from kvshare_operator.core.pool.view import PoolView
from kvshare_operator.core.quantity import bytes_of


def connector_config(
    pool: PoolView, role: str, settings: InjectionSettings, devices: str = ""
) -> config.ConnectorConfig:
    """Return the connector's configuration for a member of ``pool`` with ``role``; ``devices`` count with RDMA only."""
    spec, resolution = pool.spec, pool.resolution
    external = spec.store.external
    reports = bool(settings.report_url)
    return config.ConnectorConfig(
        store_tp_size=resolution.store_tp,
        pipeline_parallel_sizes=tuple(sorted(spec.pipeline_parallel_sizes)),
        save_decode_cache=spec.decode is not None and spec.decode.save_decode_cache == "Enabled",
        role=role,
        cache_namespace=resolution.cache_namespace,
        model_id=spec.model.name,
        generation=spec.model.generation,
        hash_algorithm=spec.cache.hash_algorithm,
        block_size_tokens=spec.cache.block_size_tokens,
        master_server_address=resolution.master_address or "",
        metadata_server=external.metadata_server if external else "P2PHANDSHAKE",
        protocol=spec.store.protocol.lower(),
        verify=spec.connector.verify.lower(),
        device_name=devices if spec.store.protocol == "RDMA" else "",
        staging_bytes=bytes_of(spec.connector.staging_memory_per_rank),
        report_url=settings.report_url,
        report_ca_file=names.REPORT_CA_FILE if reports else "",
        report_token_file=names.REPORT_TOKEN_FILE if reports else "",
    )


def dotted_flags(pool: PoolView, role: str, settings: InjectionSettings, devices: str = "") -> tuple[str, ...]:
    """Return the connector's flags, always the same for the same pool, role and devices."""
    return config.to_dotted_flags(connector_config(pool, role, settings, devices), kv_role=config.kv_role_of(role))


def missing_flags(arguments: Arguments, pool: PoolView, dotted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags that are not on the command line yet, in the order in which they are added."""
    present = {flag.text for flag in arguments.dotted}
    out = [flag for flag in dotted if flag not in present]
    if not arguments.get("--block-size").given:
        out.append(f"--block-size={pool.spec.cache.block_size_tokens}")
    if not arguments.get("--prefix-caching-hash-algo").given:
        out.append(f"--prefix-caching-hash-algo={pool.spec.cache.hash_algorithm}")
    return tuple(out)
