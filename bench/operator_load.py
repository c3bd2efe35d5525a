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

from bench.odd_pods import odd_pods
from bench.operator_place import PODS, POOLS, ROOT, WEBHOOKS, Place, serve, used, webhook_configuration
from bench.rounds import Ratio, ratio
from kvshare_operator.api import names
from kvshare_operator.core.injection.inject import Injected
from kvshare_operator.core.injection.patch import difference
from pods import pod_p0, pool_p1, run
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
        odd: generated pods for the pure function; a tenth of them also goes through the API server.
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


def pool(name: str) -> Json:
    """A pool whose store is this machine's loopback, where nobody listens: refused at once."""
    made = pool_p1(store={"type": "External", "external": {"masterAddress": "127.0.0.1:9"}})
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
    place.rest("POST", POOLS, pool("p1"))
    place.until(lambda: bool(place.rest("GET", f"{POOLS}/p1").get("status")), "the pool has a status")
    found: dict[bool, list[Creation]] = {True: [], False: []}
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
    rates = ratio([one.rate for one in found[True]], [one.rate for one in found[False]])
    added = statistics.median(a.p99 - b.p99 for a, b in zip(found[True], found[False], strict=True))
    return {
        "pods_a_second": statistics.median(one.rate for one in found[True]),
        "pods_a_second_without": statistics.median(one.rate for one in found[False]),
        "rate_ratio": _ratio(rates),
        "added_median_ms": 1e3
        * statistics.median(a.median - b.median for a, b in zip(found[True], found[False], strict=True)),
        "added_p99_ms": 1e3 * added,
    }


def scale(place: Place, creator: Creator, sizes: Sizes) -> Json:
    """Many pools with many members: until all are counted, a steady state, a restart."""
    place.rest("DELETE", f"{POOLS}/p1")
    place.rest("POST", WEBHOOKS, webhook_configuration(place))
    time.sleep(2)
    began = time.monotonic()
    for number in range(sizes.pools):
        place.rest("POST", POOLS, pool(f"scale-{number}"))
    looked = place.until(lambda: _with_status(place) == sizes.pools, "every pool has a status", 900)
    pools_seconds = time.monotonic() - began
    members = [opted_in(f"m-{i}", f"scale-{i % sizes.pools}") for i in range(sizes.members)]
    made = creator.create(members)
    counted = place.until(lambda: _members(place) == sizes.members, "every member is counted", 900)
    time.sleep(min(10, sizes.steady_seconds))
    steady = steady_state(place, sizes.steady_seconds)
    memory = used(place.processes["controller"])[1]
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
        "restart_seconds": again,
        "restart_processor_seconds": used(fresh)[0],
        "restart_megabytes": used(fresh)[1],
    }


def steady_state(place: Place, seconds: int) -> Json:
    """Watch that nothing is written, and what the controller costs meanwhile."""
    before, cost = _versions(place), used(place.processes["controller"])[0]
    written = place.metric("kvshare_operator_status_writes_total")
    time.sleep(seconds)
    more = place.metric("kvshare_operator_status_writes_total") - written
    if more or _versions(place) != before:
        raise WrongError(f"{more:.0f} writes in {seconds} s in which nothing happened")
    return {"seconds": seconds, "writes": 0, "cores": (used(place.processes["controller"])[0] - cost) / seconds}


def strange(place: Place, creator: Creator, sizes: Sizes) -> Json:
    """Generated pods through the pure function, and a tenth of them through the API server."""
    pods = odd_pods(sizes.odd)
    injected = 0
    for pod in pods:
        before = json.dumps(pod, sort_keys=True)
        outcome = run(pod)
        if json.dumps(pod, sort_keys=True) != before:
            raise WrongError(f"the pod that was given has been changed: {before[:500]}")
        if not isinstance(outcome, Injected):
            if not (outcome.message and outcome.remedy):
                raise WrongError(f"refused without message or remedy: {before[:500]}")
            continue
        injected += 1
        again = run(outcome.pod)
        if not isinstance(again, Injected) or difference(outcome.pod, again.pod):
            raise WrongError(f"not the same when it is injected again: {before[:500]}")
    place.rest("POST", POOLS, pool("p1"))
    place.until(lambda: bool(place.rest("GET", f"{POOLS}/p1").get("status")), "the pool has a status")
    time.sleep(1)
    through = pods[: max(1, sizes.odd // 10)]
    for number, pod in enumerate(through):
        pod["metadata"] |= {"name": f"odd-{number}", "namespace": "default"}
    answers = [answer for _, answer in creator.answers(through)]
    stored = [answer.json() for answer in answers if answer.status_code == 201]
    invalid = [answer.text for answer in answers if answer.status_code >= 500]
    if invalid:
        raise WrongError(f"the API server failed: {invalid[0][:500]}")
    if wrong := half_injected(stored):
        raise WrongError(f"half injected: {wrong[:5]}")
    # What the API server refuses with the webhook it must refuse without it too.
    place.rest("DELETE", f"{WEBHOOKS}/kvshare")
    time.sleep(2)
    refused = [pod for pod, answer in zip(through, answers, strict=True) if answer.status_code != 201]
    blamed = [answer for _, answer in creator.answers(refused) if answer.status_code == 201]
    if blamed:
        raise WrongError(f"valid without the webhook, invalid with it: {blamed[0].text[:500]}")
    return {
        "through_the_function": len(pods),
        "injected": injected,
        "through_the_api_server": len(through),
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


def _with_status(place: Place) -> int:
    return sum(bool((one.get("status") or {}).get("conditions")) for one in _pools(place))


def _members(place: Place) -> int:
    return sum(int(((one.get("status") or {}).get("members") or {}).get("total", 0)) for one in _pools(place))


def _versions(place: Place) -> list[str]:
    return sorted(one["metadata"]["uid"] + one["metadata"]["resourceVersion"] for one in _pools(place))


def _reconciled(place: Place) -> float:
    try:
        return place.metric("kvshare_operator_reconciles_total")
    except OSError:
        return 0.0


def page(found: Json) -> str:
    """The figures as a page of the documentation."""
    create, many, steady, odd = found["creation"], found["scale"], found["scale"]["steady"], found["strange"]
    rate = create["rate_ratio"]
    rows = [
        ("Pods created a second, 16 at once, without / with the webhook",
         f"{create['pods_a_second_without']:.0f} / {create['pods_a_second']:.0f}"),
        ("Ratio of the two (least and most of a round)",
         f"{rate['median']:.2f} ({rate['least']:.2f} to {rate['most']:.2f})"),
        ("Added to one request, median / 99th percentile",
         f"{create['added_median_ms']:.0f} ms / {create['added_p99_ms']:.0f} ms"),
        (f"{many['pools']:,} pools created and looked at", f"{many['pools_created_and_ready_seconds']:.0f} s"),
        (f"{many['members']:,} pods injected", f"{many['members_a_second']:.0f} a second"),
        ("All counted in the status after the last one", f"{many['members_counted_after_the_last_seconds']:.1f} s"),
        (f"Writes in a steady state of {steady['seconds']} s", f"{steady['writes']}"),
        ("Cores of the controller meanwhile", f"{steady['cores']:.3f}"),
        ("Memory of the controller", f"{many['controller_megabytes']:.0f} MB"),
        ("Killed and started again: all pools looked at, nothing written", f"{many['restart_seconds']:.0f} s"),
        ("Generated pods through the injection / refused with a reason",
         f"{odd['through_the_function']:,} / {odd['through_the_function'] - odd['injected']:,}"),
        ("Generated pods through the API server / injected as a whole / refused by Kubernetes itself",
         f"{odd['through_the_api_server']:,} / {odd['injected_as_a_whole']:,} / "
         f"{odd['refused_by_kubernetes_itself']:,}"),
        ("Invalid patches, half injected pods", f"{odd['invalid_patches']}, {odd['half_injected']}"),
    ]  # fmt: skip
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return f"""# The operator under load

Written by `make bench-operator` on {found["date"]}: a real kube-apiserver, one controller and one webhook process, on
two shared cores. The test client takes its part too, so rates are lower than on a real control plane; the ratio
within a round is what can be compared.

| What | Figure |
|---|---|
{table}
"""


def main() -> int:
    """Measure, check, and write `docs/benchmarks/operator.md` and `operator.json`."""
    parser = argparse.ArgumentParser(prog="python -m bench.operator_load", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a short run that shows that everything works")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the results")
    given = parser.parse_args()
    sizes = SMALL if given.small else Sizes()
    found: Json = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    try:
        with tempfile.TemporaryDirectory(prefix="kvshare-load-") as folder, serve(Path(folder)) as place:
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
    print(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
