"""How `kvshare purge` deletes: a Mooncake client of its own process, here or in a pod of the cluster.

Why this exists: the master's HTTP port can delete everything or nothing, so objects are removed by Mooncake's client.
It is started as a child, because it is native code that may end its process. The same few lines run here, where
Mooncake is installed and the master can be reached, or in a pod of the store or of an engine, by a command for the
user to run. Removal is never forced: what somebody has looked up within the master's lease stays.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from kvshare_operator.core.pool.members import Member
from kvshare_operator.core.store.identity import master_address, store_name

CODE: Final = """\
import json, os, sys
os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
if code := store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", sys.argv[1]):
    sys.exit(f"the master at {sys.argv[1]} refused a client: code {code}")
print("REMOVED", json.dumps([store.remove_by_regex(pattern, False) for pattern in sys.argv[2:]]))
store.close()
"""
"""Arguments: the master's address, patterns. No data travels, so protocol and memory do not matter."""
_SECONDS: Final = 300.0


class CannotRemoveError(Exception):
    """Nothing can be deleted from here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A pod in which Mooncake is installed: its namespace, `TYPE/NAME` or name, and container (empty: the only one)."""

    namespace: str
    pod: str
    container: str


def remove_here(master: str, patterns: Sequence[str]) -> list[int]:
    """Delete what matches; return how many objects went, by pattern. Raises CannotRemoveError."""
    if importlib.util.find_spec("mooncake") is None:
        raise CannotRemoveError("Mooncake is not installed here")
    try:
        done = subprocess.run(
            [sys.executable, "-c", CODE, master, *patterns],
            capture_output=True, text=True, errors="replace", check=False, timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CannotRemoveError(f"the master at {master} did not answer within {_SECONDS:g} s") from error
    for line in done.stdout.splitlines():
        if line.startswith("REMOVED "):
            counts: list[int] = json.loads(line.removeprefix("REMOVED "))
            if min(counts, default=0) < 0:
                raise CannotRemoveError(f"the master at {master} refused: code {min(counts)}")
            return counts
    words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise CannotRemoveError(f"no Mooncake client for {master} could be started here: {words[:300]}")


def place_for(pool: str, address: str, members: Iterable[Member]) -> Place | None:
    """Return a pod from which the store of a pool (`ns/name`) can be reached; None when none is known."""
    namespace, _, name = pool.partition("/")
    if address == master_address(namespace, name):
        return Place(namespace, f"statefulset/{store_name(name, 'nodes')}", "")
    of_pool = [one for one in members if (one.namespace, one.pool) == (namespace, name) and one.record is not None]
    for member in sorted(of_pool, key=lambda one: (one.report is None, one.name)):
        if member.injected and not member.is_worker and member.record is not None:
            return Place(namespace, member.name, member.record.container)
    return None


def command(place: Place, master: str, patterns: Sequence[str]) -> str:
    """Return the command that deletes from inside a pod."""
    where = ["kubectl", "-n", place.namespace, "exec", place.pod]
    container = ["-c", place.container] if place.container else []
    return shlex.join([*where, *container, "--", "python3", "-c", CODE, master, *patterns])
