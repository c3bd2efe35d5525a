"""`python3 -m testbed.prepare [fast|apiserver|engine|node|existing-cluster]`: get this machine ready."""

import argparse
import sys

from testbed.prepare import runner
from testbed.prepare.plan import PLANS
from testbed.prepare.step import UnpreparableError


def main() -> int:
    """Run the plan that the command line names; 0 when everything is prepared."""
    parser = argparse.ArgumentParser(prog="python3 -m testbed.prepare", description=__doc__)
    parser.add_argument("plan", nargs="?", choices=sorted(PLANS), default="node")
    parser.add_argument("--quiet-when-done", action="store_true", help="one line when nothing is to do")
    given = parser.parse_args()
    try:
        prepared = runner.run(PLANS[given.plan](), quiet_when_done=given.quiet_when_done)
    except UnpreparableError as error:
        print(f"this machine cannot be prepared: {error}", file=sys.stderr)
        return 1
    return 0 if prepared else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; finished steps are kept", file=sys.stderr)
        sys.exit(130)
