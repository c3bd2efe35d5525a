"""Runs steps one after the other: a progress line for each, and an explanation when one fails.

One preparation at a time: a lock file in the cache keeps a second one waiting.
"""

import fcntl
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from testbed import places
from testbed.prepare.command import CommandFailedError, Commands
from testbed.prepare.step import Step, UnpreparableError


def run(steps: Sequence[Step], *, quiet_when_done: bool = False) -> bool:
    """Run all steps in order.

    Args:
        steps: what to do.
        quiet_when_done: print one line in total when every step was done before.

    Returns:
        Whether everything is prepared; an explanation has been printed otherwise.
    """
    begin = time.monotonic()
    with _only_one():
        if quiet_when_done and all(step.done() for step in steps):
            _say(f"prepared: all {len(steps)} steps were done before\n")
            return True
        for number, step in enumerate(steps, 1):
            _say(f"[{number}/{len(steps)}] {step.name} ... ")
            if step.done():
                _say("done before\n")
                continue
            start = time.monotonic()
            slug = re.sub(r"[^a-z0-9]+", "-", step.name.lower()).strip("-")
            log = places.PREPARE_LOGS / f"{slug}.log"
            log.unlink(missing_ok=True)
            try:
                step.action(Commands(log))
                if not step.done():
                    raise UnpreparableError("its commands succeeded, but the result is not there")
            except (CommandFailedError, UnpreparableError, OSError) as error:
                _say("FAILED\n")
                _explain(number, len(steps), step, error)
                return False
            _say(f"{time.monotonic() - start:.0f} s\n")
    _say(f"prepared in {time.monotonic() - begin:.0f} s\n")
    return True


def _explain(number: int, total: int, step: Step, error: Exception) -> None:
    lines = ["", f"Preparation stopped at step {number} of {total}: {step.name}"]
    if isinstance(error, CommandFailedError):
        lines.append(f"  command: {shlex.join(error.command)}")
        lines.append("  could not be started" if error.code is None else f"  exit code: {error.code}")
        lines.append(f"  last lines (all of it: {error.log}):")
        lines += [f"    {line}" for line in error.tail.splitlines()]
    else:
        lines.append(f"  {error}")
    lines.append(f"  what to do: {step.remedy}")
    lines.append("  Then run the same command again: finished steps are kept.")
    print("\n".join(lines), file=sys.stderr, flush=True)


@contextmanager
def _only_one() -> Iterator[None]:
    places.CACHE.mkdir(parents=True, exist_ok=True)
    with (places.CACHE / "prepare.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another preparation is running on this machine, waiting for its end\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
