"""The revision of a pool: a short hash over everything that reaches a member.

Why this exists: a pod that was injected for another revision is `Outdated`. Only what is injected may enter,
so that a change of `onConflict` or of the operator itself outdates nobody.
"""

from __future__ import annotations

import hashlib
import json

from kvshare_operator.api.pool import Spec
from kvshare_operator.core.pool.resolve import Resolution


def revision(spec: Spec, resolution: Resolution, connector_image: str) -> str:
    """Return ten hex digits; equal input gives equal digits in every process.

    The pin of Store TP and the namespace are inside. The listed sizes are not: adding one that fits moves
    nothing. Store TP itself is not either: it is normalised once a member reports its KV heads, and a value
    that really differs is `CacheSplit`, which is stronger.
    """
    facts = {
        "storeTPSize": spec.store_tp_size,
        "cacheNamespace": resolution.cache_namespace,
        "pipelineParallelSizes": sorted(spec.pipeline_parallel_sizes),
        "saveDecodeCache": spec.decode.save_decode_cache if spec.decode else "Disabled",
        "cache": spec.cache.model_dump(mode="json"),
        # How a managed store is run does not reach members: scaling it outdates nobody.
        "store": {**spec.store.model_dump(mode="json"), "managed": None},
        "masterAddress": resolution.master_address,
        "source": spec.connector.source,
        "image": connector_image if spec.connector.source != "Image" else "",
        "staging": spec.connector.staging_memory_per_rank,
    }
    if spec.connector.verify != "Size":
        # The default adds nothing: an operator that knows the field outdates no pod of before.
        facts["verify"] = spec.connector.verify
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]
