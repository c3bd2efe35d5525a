"""`python -m bench.operator_load`: the operator under load, on a real kube-apiserver of this machine.

Pods created with and without the webhook, many pools with many members, a steady state, a restart, strange pods. What
must be exact is checked (every pod injected as a whole or not at all, no write in a steady state); when it is not,
nothing is written but what was wrong. Times are figures to look at, never a reason to fail.
"""

import argparse
import copy
import datetime
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings

from bench.operator_page import page
from bench.operator_picture import draw
from bench.operator_place import PODS, POOLS, ROOT, WEBHOOKS, Place, serve, used, webhook_configuration
from bench.rounds import Ratio, ratio
from kvshare_operator.api import names
from odd_pods import mistake, odd_pods
from operator_processes import api_writes
from pods import pod_p0, pool_p1
from testbed.fair_cores import no_session_groups
from testbed.rest import api_client

Json = dict[str, Any]
AT_ONCE = 16


class WrongError(Exception):
    """Something that must be exact was not."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Attributes:
        rounds: rounds of pods with and without the webhook.
        pods: pods of a round.
        pools: pools of the scale run.
        members: pods that the webhook injected, in all.
        steady_seconds: how long nothing may be written.
        odd: generated pods, for the pure function and then through the API server.
    """

    rounds: int = 5
    pods: int = 300
    pools: int = 1000
    members: int = 10000
    steady_seconds: int = 130
    odd: int = 10000


SMALL = Sizes(rounds=2, pods=32, pools=8, members=40, steady_seconds=3, odd=100)


@dataclass(frozen=True)
class Creation:
    """Pods of one round: pods a second, and seconds of one request (median, 99th percentile)."""

    rate: float
    median: float
    p99: float


def opted_in(name: str, pool: str) -> Json:
    """A pod that joins a pool."""
    pod = copy.deepcopy(pod_p0())
    pod["metadata"] = {"name": name, "namespace": "default", "annotations": {names.POOL: pool}}
    return pod


def pool(place: Place, name: str) -> Json:
    """A pool whose store has a real master."""
    made = pool_p1(store={"type": "External", "external": {"masterAddress": place.store}})
    made["metadata"] = {"name": name, "namespace": "default"}
    return made


class Creator:
    """Creates pods from several threads, each with its own connection."""

    def __init__(self, place: Place) -> None:
        self.place, self._local = place, threading.local()
        self._clients: list[Any] = []
        self._threads = ThreadPoolExecutor(AT_ONCE)

    def _client(self) -> httpx.Client:
        if not hasattr(self._local, "client"):
            context = api_client(self.place.api.kubeconfig)
            self._local.client = context.__enter__()
            self._clients.append(context)
        found: httpx.Client = self._local.client
        return found

    def _one(self, pod: Json) -> tuple[float, httpx.Response]:
        began = time.perf_counter()
        answer = self._client().post(PODS, json=pod)
        return time.perf_counter() - began, answer

    def answers(self, pods: Sequence[Json]) -> list[tuple[float, httpx.Response]]:
        """Seconds and answer of every pod, in the order given."""
        return list(self._threads.map(self._one, pods))

    def create(self, pods: Sequence[Json]) -> Creation:
        """Create all; every one must be accepted."""
        began = time.perf_counter()
        answers = self.answers(pods)
        taken = time.perf_counter() - began
        for _, answer in answers:
            if answer.status_code != 201:
                raise WrongError(f"a pod was not created: {answer.status_code} {answer.text[:300]}")
        each = sorted(seconds for seconds, _ in answers)
        return Creation(len(pods) / taken, statistics.median(each), each[int(len(each) * 0.99)])

    def close(self) -> None:
        """End threads and connections."""
        self._threads.shutdown()
        for context in self._clients:
            context.__exit__(None, None, None)


def remove_pods(place: Place) -> None:
    """Delete all pods; no kubelet runs here that would have to agree."""
    place.rest("DELETE", f"{PODS}?gracePeriodSeconds=0")
    place.until(lambda: not place.rest("GET", f"{PODS}?limit=1")["items"], "the pods are gone", 300)


def half_injected(pods: Sequence[Json]) -> list[str]:
    """Names of pods that carry a part of an injection and not the whole."""
    wrong = []
    for pod in pods:
        containers = pod["spec"]["containers"]
        mounts = [mount for one in containers for mount in one.get("volumeMounts") or []]
        parts = (
            names.MEMBER in (pod["metadata"].get("labels") or {}),
            "--kv-transfer-config.kv_connector" in json.dumps(containers),
            any(mount["name"] == names.PAYLOAD_VOLUME for mount in mounts),
        )
        if any(parts) and not all(parts):
            wrong.append(pod["metadata"]["name"])
    return wrong


def all_pods(place: Place) -> list[Json]:
    """All pods of the namespace."""
    found: list[Json] = []
    more = ""
    while True:
        page = place.rest("GET", f"{PODS}?limit=500" + (f"&continue={more}" if more else ""))
        found += page["items"]
        more = page["metadata"].get("continue", "")
        if not more:
            return found


def creation(place: Place, creator: Creator, sizes: Sizes) -> Json:
    """Pods a second with and without the webhook, in turn."""
    place.rest("POST", POOLS, pool(place, "p1"))
    place.until(lambda: bool(place.rest("GET", f"{POOLS}/p1").get("status")), "the pool has a status")
    found: dict[bool, list[Creation]] = {True: [], False: []}
    spent, reviewed = used(place.processes["webhook"])[0], place.metric("kvshare_operator_reviews_total", "webhook")
    for number in range(sizes.rounds + 1):
        for hooked in (True, False) if number % 2 else (False, True):
            if hooked:
                place.rest("POST", WEBHOOKS, webhook_configuration(place))
                time.sleep(2)  # the API server reads its configurations every second
            made = creator.create([opted_in(f"r{number}-{hooked:d}-{i}", "p1") for i in range(sizes.pods)])
            if number:
                found[hooked].append(made)
            seen = all_pods(place)
            carrying = [pod for pod in seen if names.MEMBER in (pod["metadata"].get("labels") or {})]
            if wrong := half_injected(seen):
                raise WrongError(f"half injected: {wrong[:5]}")
            if len(carrying) != (len(seen) if hooked else 0):
                raise WrongError(f"{len(carrying)} of {len(seen)} pods injected, webhook {'on' if hooked else 'off'}")
            if hooked:
                place.rest("DELETE", f"{WEBHOOKS}/kvshare")
                time.sleep(2)
            remove_pods(place)
    spent = used(place.processes["webhook"])[0] - spent
    reviewed = place.metric("kvshare_operator_reviews_total", "webhook") - reviewed
    rates = ratio([one.rate for one in found[True]], [one.rate for one in found[False]])
    added = statistics.median(a.p99 - b.p99 for a, b in zip(found[True], found[False], strict=True))
    return {
        "pods_a_second": statistics.median(one.rate for one in found[True]),
        "pods_a_second_without": statistics.median(one.rate for one in found[False]),
        "rate_ratio": _ratio(rates),
        "added_median_ms": 1e3
        * statistics.median(a.median - b.median for a, b in zip(found[True], found[False], strict=True)),
        "added_p99_ms": 1e3 * added,
        "webhook_processor_ms_a_review": 1e3 * spent / reviewed,
    }


def scale(place: Place, creator: Creator, sizes: Sizes) -> Json:
    """Many pools with many members: until all are counted, a steady state, a restart."""
    place.rest("DELETE", f"{POOLS}/p1")
    place.rest("POST", WEBHOOKS, webhook_configuration(place))
    time.sleep(2)
    began = time.monotonic()
    for number in range(sizes.pools):
        place.rest("POST", POOLS, pool(place, f"scale-{number}"))
    looked = place.until(lambda: _ready(place) == sizes.pools, "every pool is Ready", 900)
    pools_seconds = time.monotonic() - began
    members = [opted_in(f"m-{i}", f"scale-{i % sizes.pools}") for i in range(sizes.members)]
    made = creator.create(members)
    all_ready = "every member is counted and every pool is Ready"
    counted = place.until(lambda: _members(place) == sizes.members and _ready(place) == sizes.pools, all_ready, 900)
    time.sleep(min(10, sizes.steady_seconds))
    steady = steady_state(place, sizes.steady_seconds)
    seconds, memory = used(place.processes["controller"])
    place.processes.pop("controller").kill()
    writes = _versions(place)
    before = time.monotonic()
    fresh = place.start("controller")
    full = f"every pool was looked at: {sizes.pools}"
    place.until(lambda: _reconciled(place) >= sizes.pools, full, 900)
    again = time.monotonic() - before
    if _versions(place) != writes:
        raise WrongError("a controller that was killed and started again wrote to pools of which nothing had changed")
    return {
        "pools": sizes.pools,
        "members": sizes.members,
        "pools_created_and_ready_seconds": pools_seconds,
        "pools_ready_after_the_last_seconds": looked,
        "members_a_second": made.rate,
        "members_counted_after_the_last_seconds": counted,
        "steady": steady,
        "controller_megabytes": memory,
        "controller_processor_seconds": seconds,
        "webhook_megabytes": used(place.processes["webhook"])[1],
        "restart_seconds": again,
        "restart_processor_seconds": used(fresh)[0],
        "restart_megabytes": used(fresh)[1],
    }


def steady_state(place: Place, seconds: int) -> Json:
    """Watch that nothing is written, by the API server's own count of all writes, and what the controller costs."""
    before, cost = _versions(place), used(place.processes["controller"])[0]
    written = api_writes(place.api.kubectl)
    time.sleep(seconds)
    after = api_writes(place.api.kubectl)
    more = {resource: count - written.get(resource, 0) for resource, count in after.items()}
    if after != written or _versions(place) != before:
        raise WrongError(f"writes in {seconds} s in which nothing happened, by resource: {more}")
    return {"seconds": seconds, "writes": 0, "cores": (used(place.processes["controller"])[0] - cost) / seconds}


def strange(place: Place, creator: Creator, sizes: Sizes) -> Json:
    """Generated pods through the pure function, and all of them through the API server."""
    pods: list[Json] = []
    injected = 0

    # The same pods every time; one that is wrong is made as small as it can be before it is shown.
    @settings(
        max_examples=sizes.odd, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(odd_pods())
    def look(pod: Json) -> None:
        nonlocal injected
        right, wrong = mistake(pod)
        if wrong:
            raise WrongError(f"{wrong}: {json.dumps(pod, sort_keys=True)[:500]}")
        pods.append(pod)
        injected += right

    look()
    place.rest("POST", POOLS, pool(place, "p1"))
    place.until(lambda: bool(place.rest("GET", f"{POOLS}/p1").get("status")), "the pool has a status")
    time.sleep(1)
    for number, pod in enumerate(pods):
        pod["metadata"] |= {"name": f"odd-{number}", "namespace": "default"}
    answers = [answer for _, answer in creator.answers(pods)]
    stored = [answer.json() for answer in answers if answer.status_code == 201]
    invalid = [answer.text for answer in answers if answer.status_code >= 500]
    if invalid:
        raise WrongError(f"the API server failed: {invalid[0][:500]}")
    if wrong := half_injected(stored):
        raise WrongError(f"half injected: {wrong[:5]}")
    # What the API server refuses with the webhook it must refuse without it too.
    place.rest("DELETE", f"{WEBHOOKS}/kvshare")
    time.sleep(2)
    refused = [pod for pod, answer in zip(pods, answers, strict=True) if answer.status_code != 201]
    blamed = [answer for _, answer in creator.answers(refused) if answer.status_code == 201]
    if blamed:
        raise WrongError(f"valid without the webhook, invalid with it: {blamed[0].text[:500]}")
    return {
        "through_the_function": len(pods),
        "injected": injected,
        "through_the_api_server": len(pods),
        "stored": len(stored),
        "refused_by_kubernetes_itself": len(refused),
        "injected_as_a_whole": sum(names.MEMBER in (pod["metadata"].get("labels") or {}) for pod in stored),
        "invalid_patches": 0,
        "half_injected": 0,
    }


def _ratio(found: Ratio) -> Json:
    return {"median": found.median, "least": found.least, "most": found.most}


def _pools(place: Place) -> list[Json]:
    found: list[Json] = place.rest("GET", POOLS)["items"]
    return found


def _ready(place: Place) -> int:
    return sum(
        condition["type"] == names.READY and condition["status"] == "True"
        for one in _pools(place)
        for condition in (one.get("status") or {}).get("conditions") or []
    )


def _members(place: Place) -> int:
    return sum(int(((one.get("status") or {}).get("members") or {}).get("total", 0)) for one in _pools(place))


def _versions(place: Place) -> list[str]:
    return sorted(one["metadata"]["uid"] + one["metadata"]["resourceVersion"] for one in _pools(place))


def _reconciled(place: Place) -> float:
    try:
        return place.metric("kvshare_operator_reconciles_total")
    except OSError:
        return 0.0


def main() -> int:
    """Measure, check, and write `docs/benchmarks/operator.md` and `operator.json`."""
    parser = argparse.ArgumentParser(prog="python -m bench.operator_load", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a short run that shows that everything works")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the results")
    given = parser.parse_args()
    sizes = SMALL if given.small else Sizes()
    found: Json = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    try:
        with (
            no_session_groups(), tempfile.TemporaryDirectory(prefix="kvshare-load-") as folder,
            serve(Path(folder)) as place,
        ):  # fmt: skip
            creator = Creator(place)
            try:
                for number, part in enumerate((creation, scale, strange), 1):
                    began = time.monotonic()
                    print(f"[{number}/3] {part.__name__} ...", end=" ", flush=True)
                    found[part.__name__] = part(place, creator, sizes)
                    print(f"{time.monotonic() - began:.0f} s", flush=True)
            finally:
                creator.close()
    except WrongError as error:
        print(f"\nnothing was written: {error}", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "operator.json").write_text(json.dumps(found, indent=2) + "\n")
    (given.out / "operator.md").write_text(page(found))
    draw(found, given.out / "operator.svg")
    print(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
