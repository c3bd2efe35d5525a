"""Held: puts over TCP that never give memory back while bytes for it may still be on their way.

May live here: one batch of puts through Mooncake's sessions, and the reason for them. A put in one call that waits for
a store node in vain is revoked at once, the master gives its memory to the next object, and what the connection has
already taken in is written there when the node or the network goes on: the next object is whole, readable and wrong.
A session that is left open keeps its memory; the master takes it back when its ``put_start_release_timeout`` is over
(10 minutes). With RDMA nothing is delivered after a transfer has failed, so puts in one call are right there.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from kvshare_connector.store import codes
from kvshare_connector.store.avoided import HUNG_AFTER_SECONDS

#: Methods of Mooncake's client that this needs.
METHODS = (
    "batch_put_from_multi_buffer_ranges", "batch_put_session_end", "batch_put_session_revoke",
    "batch_put_session_start",
)  # fmt: skip


def put_held(
    raw: Any,
    keys: Sequence[str],
    addresses: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
    config: Any,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[int]:
    """Put objects, each gathered from its segments; one code per key, 0 also for a key that exists.

    A node that does not answer costs one timeout: the keys behind it are given up without being sent.

    Args:
        raw: Mooncake's client.
        keys: names, each once.
        addresses: of every key's segments.
        sizes: bytes of every key's segments, none of them 0.
        config: Mooncake's ``ReplicateConfig``.
        clock: seconds, for tests.
    """
    totals = [sum(parts) for parts in sizes]
    answers = [int(code) for code in raw.batch_put_session_start(list(keys), totals, config)]
    sent, unsent, hangs = list[int](), list[int](), False
    for i, code in enumerate(answers):
        if code == codes.ALREADY_EXISTS:
            answers[i] = codes.OK
        if code != codes.OK:
            continue
        answers[i] = codes.TRANSFER_FAIL
        if hangs:
            unsent.append(i)
            continue
        began = clock()
        offsets = list(accumulate(sizes[i][:-1], initial=0))
        (moved,) = raw.batch_put_from_multi_buffer_ranges([keys[i]], [addresses[i]], [sizes[i]], [offsets])
        if moved == totals[i]:
            sent.append(i)
            continue
        answers[i] = min(int(moved), 0) or codes.TRANSFER_FAIL
        hangs = clock() - began > HUNG_AFTER_SECONDS
        if not hangs:
            unsent.append(i)
    if sent:
        for i, code in zip(sent, raw.batch_put_session_end([keys[i] for i in sent]), strict=True):
            answers[i] = int(code)
    if unsent:
        raw.batch_put_session_revoke([keys[i] for i in unsent])
    return answers
