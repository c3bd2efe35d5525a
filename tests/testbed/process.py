"""Processes that the test bed starts: own session, own log file, stopped by the recorded id and never by name."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.prepare.command import last_lines


class NotReadyError(Exception):
    """A program ended, or was not ready in time; the text has the last lines of its log."""


@dataclass(frozen=True)
class Identity:
    """A process that cannot be taken for a later one with the same id.

    Attributes:
        pid: process id, which is also the id of its session and process group.
        started: start time in clock ticks after boot, from /proc.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Identity | None":
        """The identity of a running process; None when there is none."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] == "Z" else cls(pid, int(fields[19]))

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return Identity.of(self.pid) == self

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and everything in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self, grace_seconds: float) -> None:
        """End the process group: politely, and by force after the grace time."""
        if self.alive():
            self.signal_group(signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        self.signal_group(signal.SIGKILL)


class Process:
    """One started program."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        outlives_us: bool = False,
    ) -> None:
        """Start it; it keeps running until `stop` or `kill`.

        Args:
            name: for messages.
            command: program and arguments.
            log: file for its output; older output is replaced.
            environment: the whole environment; the present one when None.
            folder: working folder.
            outlives_us: whether it keeps running when this process dies.
        """
        self.name = name
        self.command = [str(word) for word in command]
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        # The kernel ends the program when this process dies, even by SIGKILL; a test run leaves nothing behind.
        bond = () if outlives_us else ("setpriv", "--pdeathsig", "KILL", "--")
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [*bond, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=None if environment is None else dict(environment),
                cwd=folder,
            )
        self.identity = Identity.of(self.popen.pid)

    def check(self) -> None:
        """Raise `NotReadyError` if the program has ended."""
        code = self.popen.poll()
        if code is not None:
            raise NotReadyError(
                f"{self.name} ended with code {code}; last lines of {self.log}:\n{last_lines(self.log)}"
            )

    def wait_until(self, ready: Callable[[], bool], *, seconds: float, what: str = "be ready") -> None:
        """Wait for a condition.

        Raises:
            NotReadyError: if the program ends or the time is over before.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise NotReadyError(
                    f"{self.name} did not {what} within {seconds:.0f} s; last lines of {self.log}:\n"
                    f"{last_lines(self.log)}"
                )
            time.sleep(0.05)

    def stop(self, grace_seconds: float = 10) -> None:
        """End the program and its children; more than once is fine."""
        if self.popen.poll() is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace_seconds)
        self.kill()

    def kill(self) -> None:
        """End the program and its children at once, as a crash does."""
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def pause(self) -> None:
        """Stop the program's clock: it hangs, but its connections stay open.

        The signal is only the request: on a busy machine a thread may still answer a call after it was sent.
        """
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not _stands_still(self.popen.pid) and time.monotonic() < deadline:
            time.sleep(0.005)

    def resume(self) -> None:
        """Let a paused program go on."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send a signal to the program and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def _stands_still(group: int) -> bool:
    """Whether every thread of a process group is stopped, or has ended."""
    for thread in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # proc(5): state, parent and process group follow the name, which is in parentheses.
            state, _, of = thread.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "TtZX":
                return False
    return True
