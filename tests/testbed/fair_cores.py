"""Cores are shared by threads, not by groups of them, so that no group keeps others waiting for seconds.

Linux divides a core between groups first: cgroups of the `cpu` controller, and sessions where `sched_autogroup_enabled`
is set. On Linux 6.18 a group with a busy thread on every core kept all others (pods, the store, the kernel's own
threads) from running for up to 8 s. The scheduler's tables show it: the group ran 1.7 of 2 s and its virtual time moved
by 2 ms, since its weight changes with every tick and each change gives back what it used. Threads that poll, as vLLM's
ranks and Mooncake's clients do, are such threads, and the store looked dead to them. Without groups no thread waited
longer than 0.4 s in the same traffic.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")
ROOT_GROUP = Path("/sys/fs/cgroup/cpu/cgroup.procs")
"""Of a `cpu` controller that has its own hierarchy (cgroup v1); processes leave its groups without leaving others."""


def end_session_groups() -> str | None:
    """From now on sessions are no groups.

    Returns:
        What was before, for `restore_session_groups`; None where we may not change it.
    """
    try:
        before = SWITCH.read_text()
        SWITCH.write_text("0")
    except OSError:  # another kernel, or not root: then sessions stay what they are
        return None
    return before


def restore_session_groups(before: str | None) -> None:
    """The machine is as it was before `end_session_groups`."""
    if before is not None:
        SWITCH.write_text(before)


@contextmanager
def no_session_groups() -> Iterator[None]:
    """Within the block sessions are no groups."""
    before = end_session_groups()
    try:
        yield
    finally:
        restore_session_groups(before)


def container_defaults(ctr: Path, file: Path) -> Path | None:
    """Write the runtime's defaults for containers, with a hook that takes each out of its `cpu` group.

    Args:
        ctr: containerd's own client, which knows its defaults.
        file: where to write them.

    Returns:
        The file; None where all controllers have one hierarchy (cgroup v2), which has no such way out.
    """
    if not ROOT_GROUP.exists():
        return None
    answer = subprocess.run([str(ctr), "oci", "spec"], capture_output=True, text=True, check=True)
    defaults = json.loads(answer.stdout)
    # A hook gets the container's state, with the id of its first process, on its standard input.
    move = f"""sed -n 's/.*"pid": *\\([0-9]*\\).*/\\1/p' > {ROOT_GROUP}"""
    defaults["hooks"] = {"createRuntime": [{"path": "/bin/sh", "args": ["sh", "-c", move], "timeout": 10}]}
    file.write_text(json.dumps(defaults, indent=1))
    return file
