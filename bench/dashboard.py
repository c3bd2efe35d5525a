"""`python -m bench.dashboard`: the dashboard's own queries on real data, as `docs/figures/dashboard.svg`.

A one-node cluster with the product, a store and two engines of different TP size and layout; traffic for some minutes,
in the middle of which the store node is deleted; a real Prometheus scrapes engines and operator as the chart's monitors
would.
"""

import argparse
import itertools
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.dashboard_picture import Line, draw
from testbed import places
from testbed.cluster import cluster
from testbed.completions import Server, ServerError
from testbed.demo import engines
from testbed.demo.place import OwnCluster
from testbed.demo.product import NAMESPACE as PRODUCT
from testbed.demo.settings import Settings
from testbed.demo.steps import ENGINE_SECONDS, NAMESPACE, Demo
from testbed.kubectl import Kubectl
from testbed.ports import free_ports, is_open
from testbed.prepare.go_programs import program
from testbed.process import Process

DASHBOARD = places.REPOSITORY / "charts" / "kvshare" / "dashboards" / "kvshare.json"
OUT = places.REPOSITORY / "docs" / "figures" / "dashboard.svg"
SCRAPE_SECONDS, RATE_SECONDS, STEP_SECONDS = 2, 20, 2
FAMILIES, COMMON, OWN = 40, 640, 160


def main() -> int:
    """Run the story and draw what the queries answer."""
    parser = argparse.ArgumentParser(prog="python -m bench.dashboard", description=__doc__)
    parser.add_argument("--seconds", type=int, default=180, help="length of the traffic")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    with (
        cluster(places.CACHE / "cluster" / "dashboard", images=OwnCluster.archives()) as running,
        tempfile.TemporaryDirectory(prefix="kvshare-dashboard-") as folder,
    ):
        demo = Demo(OwnCluster(running), Settings(), lambda text: print(text, flush=True))
        demo.install_product()
        demo.start_store()
        demo.apply_pool()
        members = (demo.prefill, demo.decode)
        with demo.timed("engines", "starting two engines"):
            demo.kubectl.apply(*(engines.deployment(one, demo.place, demo.settings) for one in members))
            for one in members:
                demo.kubectl.wait_for_deployment(one.name, seconds=ENGINE_SECONDS)
        targets = [
            *((NAMESPACE, demo.kubectl.pod(one.selector), engines.PORT) for one in members),
            *((PRODUCT, pod, 8080) for pod in demo.kubectl.within(PRODUCT).list("pods")),
        ]
        with prometheus(Path(folder), targets) as url:
            servers = [engines.server(one, demo.place, NAMESPACE) for one in members]
            start = time.time()
            with (
                traffic(servers),
                demo.timed("traffic", f"{given.seconds} s of traffic, the store node dies in the middle"),
            ):
                time.sleep(given.seconds / 2)
                lose_store(demo.kubectl)
                time.sleep(given.seconds / 2)
            found = {panel["title"]: list(ask(url, panel, start, time.time())) for panel in panels}
    empty = [title for title, lines in found.items() if not lines]
    draw(panels, found, given.out)
    print(f"written: {given.out}; without data: {', '.join(empty) or 'none'}")
    return 0


def lose_store(kubectl: Kubectl) -> None:
    """The store node's pod is deleted; its Deployment makes another one."""
    name = kubectl.pod("app=mooncake-store")["metadata"]["name"]
    kubectl.run("delete", "pod", name, "--wait=false", "--grace-period=0", "--force")


@contextmanager
def prometheus(folder: Path, targets: Sequence[tuple[str, Mapping[str, Any], int]]) -> Iterator[str]:
    """A Prometheus that scrapes pods, with the labels that its operator would add; its address."""
    (port,) = free_ports(1)
    scraped = [
        {
            "targets": [f"{pod['status']['podIP']}:{number}"],
            "labels": {"namespace": namespace, "pod": pod["metadata"]["name"]},
        }
        for namespace, pod, number in targets
    ]
    jobs = [{"job_name": "pods", "honor_labels": True, "static_configs": scraped}]
    settings = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    process = Process(
        "prometheus",
        [
            *(program("prometheus"), f"--config.file={folder / 'prometheus.yml'}"),
            *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
        ],
        log=folder / "prometheus.log",
    )
    try:
        process.wait_until(lambda: is_open(port), seconds=30)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


@contextmanager
def traffic(servers: Sequence[Server]) -> Iterator[None]:
    """Two clients for each engine: families of prompts with a common beginning, each asked on every engine in turn."""
    over = threading.Event()

    def client(number: int) -> None:
        dice, own = random.Random(number), random.Random(1000 + number)
        for turn in itertools.count(number):
            if over.is_set():
                return
            family = random.Random(dice.randrange(FAMILIES))
            prompt = [family.randrange(20, 220) for _ in range(COMMON)] + [own.randrange(20, 220) for _ in range(OWN)]
            try:
                servers[turn % len(servers)].complete(prompt, max_tokens=8)
            except ServerError as error:
                print(f"a request failed: {error}", file=sys.stderr, flush=True)
                time.sleep(1)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(2 * len(servers))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=120)


def ask(url: str, panel: Mapping[str, Any], start: float, end: float) -> Iterator[Line]:
    """The series of a panel's queries between two times."""
    for target in panel.get("targets", ()):
        query = target["expr"].replace("$__rate_interval", f"{RATE_SECONDS}s").replace("$model", ".*")
        answer = httpx.get(
            f"{url}/api/v1/query_range",
            params={"query": query, "start": start, "end": end, "step": STEP_SECONDS},
            timeout=30,
        ).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{panel['title']}: {answer['error']}")
        for series in answer["data"]["result"]:
            points = [(float(when) - start, float(value)) for when, value in series["values"] if value != "NaN"]
            if points:
                seconds, values = zip(*points, strict=True)
                yield Line(_legend(target.get("legendFormat", ""), series["metric"]), seconds, values)


def _legend(form: str, labels: Mapping[str, str]) -> str:
    if form in ("", "__auto"):
        return ", ".join(f"{name}={value}" for name, value in labels.items() if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), form).strip()


if __name__ == "__main__":
    sys.exit(main())
