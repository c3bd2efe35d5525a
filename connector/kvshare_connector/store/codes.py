"""Codes: every number that the store answers with, what it means, and what the caller does about it.

A table, no behaviour. Mooncake's own numbers come first (its ``ErrorCode``), then three of ours for what happens before
Mooncake is asked. Numbers that nobody has listed map to a name of their family, never to an error.
"""

from dataclasses import dataclass
from enum import Enum


class Reaction(Enum):
    """What the caller does about a code.

    ``MISS``: the object is not there (any more), compute it. ``RETRY``: worth one more try now. ``DROP``: give this
    object up, a later miss. ``REOPEN``: give it up, and when it repeats replace the client object. ``USER``: give it
    up, a person has to change a setting. ``DONE`` is no trouble at all.
    """

    DONE = "done"
    MISS = "miss"
    RETRY = "retry"
    DROP = "drop"
    REOPEN = "reopen"
    USER = "user"


@dataclass(frozen=True)
class Code:
    """One number.

    Attributes:
        number: what the store answered.
        name: upper-case name, for metrics and logs.
        meaning: what happened and, where a person can act, what to do.
        reaction: what the caller does.
    """

    number: int
    name: str
    meaning: str
    reaction: Reaction


#: The client is closed or was never opened; Mooncake would end the process instead of answering.
CLOSED = -20001
#: Mooncake answered with a list of another length than the keys.
NO_ANSWER = -20002
#: The call into Mooncake raised an exception.
CALL_RAISED = -20003

OK = 0
INTERNAL_ERROR = -1
NO_SPACE = -200
INVALID_PARAMS = -600
NOT_READY = -703
NOT_FOUND = -704
ALREADY_EXISTS = -705
LEASE_EXPIRED = -707
TRANSFER_FAIL = -800
CHECKSUM_MISMATCH = -801
RPC_FAIL = -900
RPC_TIMEOUT = -901

_DONE, _MISS, _RETRY, _DROP, _REOPEN, _USER = Reaction

_TABLE: tuple[tuple[int, str, str, Reaction], ...] = (
    (OK, "OK", "done; for a put also: the key exists or somebody is writing it", _DONE),
    (INTERNAL_ERROR, "INTERNAL_ERROR", "the client failed inside", _DROP),
    (-10, "BUFFER_OVERFLOW", "the client's own buffer is too small: raise local_buffer_size", _USER),
    (-100, "SHARD_INDEX_OUT_OF_RANGE", "the master's index is out of range", _DROP),
    (-101, "SEGMENT_NOT_FOUND", "the store node that held the object is unknown to the master", _DROP),
    (-102, "SEGMENT_ALREADY_EXISTS", "the segment is mounted already", _DROP),
    (-103, "CLIENT_NOT_FOUND", "the master does not know this client any more", _REOPEN),
    (NO_SPACE, "NO_AVAILABLE_HANDLE", "no space: the store is full, fragmented, or has no node yet", _RETRY),
    (-300, "INVALID_VERSION", "client and master speak different versions: use one Mooncake release", _USER),
    (-400, "INVALID_KEY", "the key is not acceptable", _DROP),
    (-500, "WRITE_FAIL", "writing failed", _DROP),
    (INVALID_PARAMS, "INVALID_PARAMS", "sizes do not fit: the stored object has another size", _DROP),
    (-601, "ILLEGAL_CLIENT", "another client has taken the key over", _DROP),
    (-700, "INVALID_WRITE", "the write is not allowed now", _DROP),
    (-701, "INVALID_READ", "the read is not allowed now", _DROP),
    (-702, "INVALID_REPLICA", "the replica is not valid", _DROP),
    (NOT_READY, "REPLICA_IS_NOT_READY", "somebody is still writing the object", _MISS),
    (NOT_FOUND, "OBJECT_NOT_FOUND", "the object is not in the store", _MISS),
    (ALREADY_EXISTS, "OBJECT_ALREADY_EXISTS", "the key exists already", _DONE),
    (-706, "OBJECT_HAS_LEASE", "somebody is reading the object", _DROP),
    (LEASE_EXPIRED, "LEASE_EXPIRED", "the transfer took longer than the object's lease", _MISS),
    (-708, "OBJECT_HAS_REPLICATION_TASK", "the object is being copied", _DROP),
    (-709, "OBJECT_NO_REPLICATION_TASK", "the object is not being copied", _DROP),
    (-710, "REPLICA_NOT_FOUND", "the replica is not in the store", _MISS),
    (-711, "REPLICA_ALREADY_EXISTS", "the replica exists already", _DROP),
    (-712, "REPLICA_IS_GONE", "the replica has left the store", _MISS),
    (-713, "REPLICA_NOT_IN_LOCAL_MEMORY", "the replica is not in memory here", _MISS),
    (-714, "OBJECT_REPLICA_BUSY", "the replica is in use", _DROP),
    (TRANSFER_FAIL, "TRANSFER_FAIL", "a store node is dead, a queue overflowed, or the object is smaller", _REOPEN),
    (CHECKSUM_MISMATCH, "CHECKSUM_MISMATCH", "the stored bytes have changed", _MISS),
    (RPC_FAIL, "RPC_FAIL", "the master does not answer: it is down or has just restarted", _RETRY),
    (RPC_TIMEOUT, "RPC_TIMEOUT", "the master hangs", _DROP),
    (-1000, "ETCD_OPERATION_ERROR", "etcd behind the master failed", _DROP),
    (-1001, "ETCD_KEY_NOT_EXIST", "a key of the master is missing in etcd", _DROP),
    (-1002, "ETCD_TRANSACTION_FAIL", "a transaction in etcd failed", _DROP),
    (-1003, "ETCD_CTX_CANCELLED", "an operation in etcd was cancelled", _DROP),
    (-1010, "UNAVAILABLE_IN_CURRENT_STATUS", "the master cannot serve this now", _DROP),
    (-1011, "UNAVAILABLE_IN_CURRENT_MODE", "the master was not started for this", _USER),
    (-1012, "NOT_SUPPORTED", "this Mooncake does not support the call", _USER),
    (-1100, "FILE_NOT_FOUND", "the object's file is gone", _MISS),
    (-1101, "FILE_OPEN_FAIL", "the object's file cannot be opened", _MISS),
    (-1102, "FILE_READ_FAIL", "the object's file cannot be read", _MISS),
    (-1103, "FILE_WRITE_FAIL", "the object's file cannot be written", _DROP),
    (-1104, "FILE_INVALID_BUFFER", "the buffer for the object's file is wrong", _DROP),
    (-1105, "FILE_LOCK_FAIL", "the object's file is locked", _DROP),
    (-1106, "FILE_INVALID_HANDLE", "the object's file handle is wrong", _DROP),
    (-1200, "BUCKET_NOT_FOUND", "the object's bucket is gone", _MISS),
    (-1201, "BUCKET_ALREADY_EXISTS", "the bucket exists already", _DROP),
    (-1202, "KEYS_EXCEED_BUCKET_LIMIT", "the bucket is full", _DROP),
    (-1203, "KEYS_ULTRA_LIMIT", "too many keys for the bucket storage", _DROP),
    (-1300, "UNABLE_OFFLOAD", "offloading is not enabled", _DROP),
    (-1301, "UNABLE_OFFLOADING", "offloading is not possible", _DROP),
    (-1400, "TASK_NOT_FOUND", "the master's task is gone", _DROP),
    (-1401, "TASK_PENDING_LIMIT_EXCEEDED", "the master has too many tasks", _DROP),
    (-1700, "TENANT_QUOTA_EXCEEDED", "the tenant's quota is used up: raise it on the master", _USER),
    (-1701, "TENANT_NOT_REGISTERED", "the master does not know the tenant: register it", _USER),
    (-1702, "TENANT_NOT_EMPTY", "the tenant still has objects", _DROP),
    (CLOSED, "CLOSED", "the client is closed", _DROP),
    (NO_ANSWER, "NO_ANSWER", "Mooncake did not answer for every key", _REOPEN),
    (CALL_RAISED, "CALL_RAISED", "the call into Mooncake raised an exception", _REOPEN),
)  # fmt: skip

CODES: dict[int, Code] = {row[0]: Code(*row) for row in _TABLE}

#: Families of numbers of which Mooncake uses more than the table names: (lowest, highest, name, meaning).
_FAMILIES = (
    (-1099, -1000, "HIGH_AVAILABILITY", "the backend of a replicated master failed"),
    (-1199, -1100, "FILE", "the store's files failed"),
    (-1299, -1200, "BUCKET", "the store's bucket storage failed"),
    (-1399, -1300, "OFFLOAD", "offloading failed"),
    (-1499, -1400, "TASK", "a task of the master failed"),
    (-1599, -1500, "SERIALIZATION", "client and master could not read each other"),
    (-1699, -1600, "DISTRIBUTED_FILE_SYSTEM", "the store's file system failed"),
    (-1799, -1700, "TENANT", "the tenant's quota refuses"),
)


def explain(number: int) -> Code:
    """What ``number`` means; positive numbers are byte counts and count as done. Never raises."""
    known = CODES.get(number)
    if known is not None:
        return known
    if number > 0:
        return Code(number, "OK", f"{number} bytes", Reaction.DONE)
    for lowest, highest, name, meaning in _FAMILIES:
        if lowest <= number <= highest:
            return Code(number, name, meaning, Reaction.DROP)
    return Code(number, "UNKNOWN", f"code {number}, which this release does not know", Reaction.DROP)
