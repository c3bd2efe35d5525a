"""Running one external command: output into a log file, a typed error with the last lines when it fails."""

import os
import shlex
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 25


class CommandFailedError(Exception):
    """A command ended with another code than 0, or does not exist."""

    def __init__(self, command: Sequence[str], code: int | None, tail: str, log: Path) -> None:
        self.command = tuple(command)
        self.code = code
        self.tail = tail
        self.log = log
        ending = "could not be started" if code is None else f"ended with code {code}"
        super().__init__(f"{shlex.join(self.command)} {ending}")


class Commands:
    """Runs the commands of one step; all their output goes to one log file."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def run(
        self,
        command: Sequence[str | Path],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Run and wait.

        Args:
            command: program and arguments.
            folder: working folder.
            environment: variables added to the present ones.

        Raises:
            CommandFailedError: with the last lines of the output.
        """
        words = [str(word) for word in command]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            output.write(f"$ {shlex.join(words)}\n".encode())
            output.flush()
            start = output.tell()
            try:
                code: int | None = subprocess.run(
                    words,
                    cwd=folder,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
            except OSError as error:
                output.write(f"{error}\n".encode())
                code = None
        if code != 0:
            raise CommandFailedError(words, code, last_lines(self.log, start), self.log)


def last_lines(file: Path, start: int = 0, count: int = TAIL_LINES) -> str:
    """The last `count` lines of a text file, counted from byte `start` on; empty when there is no file."""
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            tail = deque((line.decode(errors="replace").rstrip() for line in stream), maxlen=count)
    except FileNotFoundError:
        return ""
    return "\n".join(tail)
