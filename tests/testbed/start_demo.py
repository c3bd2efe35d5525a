"""`python3 -m testbed.start_demo [--keep]`: prepare this machine, then become the demo.

Standard library only: it runs on the machine's own Python, before the environment exists.
"""

import os
import sys
import time

from testbed import places
from testbed.demo.settings import SettingsError, from_environment
from testbed.prepare import runner
from testbed.prepare.plan import PLANS
from testbed.prepare.step import UnpreparableError


def main() -> int:
    """Prepare, then replace this process by the demo in the environment's Python."""
    start = time.monotonic()
    try:
        settings = from_environment(os.environ)
        plan = PLANS["existing-cluster" if settings.existing_cluster else "node"]
        prepared = runner.run(plan())
    except (SettingsError, UnpreparableError) as error:
        print(error, file=sys.stderr)
        return 2
    if not prepared:
        return 1
    os.environ["KVSHARE_PREPARE_SECONDS"] = f"{time.monotonic() - start:.1f}"
    os.chdir(places.REPOSITORY)
    python = str(places.environment_python())
    os.execv(python, [python, "-m", "testbed.demo", *sys.argv[1:]])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
