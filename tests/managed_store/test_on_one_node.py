"""A managed store on the one-node cluster: an engine uses it, node and master are killed, it goes with its pool.

The tests of this file are one story: each goes on where the one before stopped. The nodes' image of the test bed
has Mooncake mounted from this machine; a policy of the cluster adds that mount to the store's pods.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from kvshare_operator.api import names
from stored_keys import block_keys
from testbed import places
from testbed.cluster import cluster
from testbed.completions import Server
from testbed.demo import engines, product
from testbed.demo.engines import DemoEngine
from testbed.demo.place import ENVIRONMENT, MODEL, OwnCluster
from testbed.demo.settings import Settings
from testbed.demo.steps import PROMPT_TOKENS, text_tokens, whole_blocks
from testbed.kubectl import Kubectl, NotTrueInTimeError, Object
from testbed.prepare.go_programs import search_path

pytestmark = pytest.mark.scenario
NAMESPACE = "managed"
KINDS = "deployments,statefulsets,services,poddisruptionbudgets,networkpolicies,pods"
ENGINE = DemoEngine("decode", 1, "HND", "both")
MASTER, NODES = "kvs-demo-master", "kvs-demo-nodes"
CONTROLLER = "app.kubernetes.io/component=controller"
FULL_PASS_SECONDS = 60
REUSABLE = whole_blocks(PROMPT_TOKENS - 1)
STORE_TP = 2  # of a prefill size of 2 and a decode size of 1


class Place:
    """The cluster with the product and pool `demo`."""

    def __init__(self, on: OwnCluster) -> None:
        self.on = on
        self.kubectl: Kubectl = on.kubectl.within(NAMESPACE)

    def apply_pool(self, nodes: int) -> None:
        """Pool `demo`, with a managed store of so many small nodes."""
        managed = {"nodes": nodes, "capacityPerNode": "256Mi", "image": self.on.engine_image}
        self.kubectl.apply(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {"name": "demo"},
                "spec": {
                    "model": {"name": "kvshare-demo/tiny-llama", "paths": [MODEL]},
                    "prefill": {"tensorParallelSizes": [2]},
                    "decode": {"tensorParallelSizes": [1], "saveDecodeCache": "Enabled"},
                    "cache": {"blockSizeTokens": 32},
                    "store": {"type": "Managed", "managed": managed},
                },
            }
        )

    def reachable(self) -> Object:
        """The pool's condition about its store."""
        conditions = self.kubectl.get("kvsharepool", "demo").get("status", {}).get("conditions", [])
        found: Object = next((one for one in conditions if one["type"] == names.STORE_REACHABLE), {})
        return found

    def wait(self, what: str, true: Callable[[], bool], seconds: float = 120) -> None:
        """Wait, and tell the pool's and the pods' state when it does not come true."""

        def about() -> str:
            return f"{self.kubectl.describe('kvsharepool', 'demo')}\n{self.kubectl.what_happens()}"

        self.kubectl.wait_for(what, true, seconds=seconds, about=about)

    def wait_for_store(self, nodes: int) -> None:
        """Wait until master and all nodes are ready, and the status says so."""
        self.wait(
            f"all {nodes} node(s) are ready",
            lambda: (
                self.reachable().get("reason") == "Reachable"
                and f"all {nodes} store node(s)" in self.reachable()["message"]
            ),
        )

    def engine(self) -> Server:
        """The engine in its present pod."""
        return engines.server(ENGINE, self.on, NAMESPACE)

    def fresh_engine(self) -> Server:
        """The engine in a new pod, whose own cache is empty."""
        self.kubectl.run("delete", "pod", "--selector", ENGINE.selector)
        self.wait("a new pod of the engine is there", lambda: bool(self.kubectl.pod(ENGINE.selector)))
        name = self.kubectl.pod(ENGINE.selector)["metadata"]["name"]
        self.kubectl.run("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=590s", timeout=600)
        return self.engine()

    def keys(self) -> set[str]:
        """The objects that the store holds, by the master's own list; waits for a master that is being replaced."""
        found = set[str]()

        def listed() -> bool:
            nonlocal found
            try:
                address = self.kubectl.pod_ip("app.kubernetes.io/component=store-master")
                answer = httpx.get(f"http://{address}:9003/get_all_keys", timeout=10).raise_for_status()
            except (KeyError, NotTrueInTimeError, httpx.HTTPError):
                return False
            found = set(answer.text.splitlines())
            return True

        self.wait("the master lists its keys", listed)
        return found

    def saved(self, salt: int) -> tuple[int, ...]:
        """Ask for a new prompt until its blocks are in the store; return the answer.

        The master gives a dead node's memory away until the node's time is over. What a save loses there is saved with
        the next request for it.
        """
        before, answers = self.keys(), set[tuple[int, ...]]()

        def grown() -> bool:
            answers.add(self.engine().complete(text_tokens(PROMPT_TOKENS, salt=salt)).token_ids)
            # Keys of a dead node disappear meanwhile, so new ones are counted and not all.
            return len(self.keys() - before) >= STORE_TP * REUSABLE // 32

        self.wait("the blocks are in the store", grown, seconds=60)
        (answer,) = answers
        return answer

    def kill(self, pod: str) -> None:
        """End a pod without a word to its processes' friends, and wait for its replacement."""
        old = self.kubectl.get("pod", pod)["metadata"]["uid"]
        self.kubectl.run("delete", "pod", pod, "--grace-period=0", "--force")
        self.wait(f"{pod} is gone", lambda: old not in [p["metadata"]["uid"] for p in self.kubectl.list("pods")])


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The product, and a pool whose store is ready."""
    with cluster(places.CACHE / "cluster" / "store-tests", images=OwnCluster.archives()) as running:
        made = Place(OwnCluster(running))
        running.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        running.kubectl.apply(*packages_for_store_pods())
        product.install(made.on)
        made.apply_pool(1)
        made.wait_for_store(1)
        yield made


def packages_for_store_pods() -> list[Object]:
    """A policy that mounts the machine's Python packages into the store's pods, as a node image would have them."""
    volume = (
        'Object.spec.volumes{name: "packages", hostPath: Object.spec.volumes.hostPath{'
        f'path: "{places.site_packages().resolve()}", type: "Directory"}}}}'
    )
    mount = f'Object.spec.containers.volumeMounts{{name: "packages", mountPath: "{ENVIRONMENT}", readOnly: true}}'
    patches = (("/spec/volumes/-", volume), ("/spec/containers/0/volumeMounts/-", mount))
    entries = ", ".join(f'JSONPatch{{op: "add", path: "{path}", value: {value}}}' for path, value in patches)
    api = "admissionregistration.k8s.io/v1"
    policy = {
        "apiVersion": api,
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": "packages"},
        "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {
                "objectSelector": {"matchExpressions": [{"key": names.STORE, "operator": "Exists"}]},
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ],
            },
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{entries}]"}}],
        },
    }
    binding = {
        "apiVersion": api,
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": "packages"},
        "spec": {"policyName": "packages"},
    }
    return [policy, binding]


ANSWERS: dict[int, tuple[int, ...]] = {}
STORE_KEYS = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup(os.environ["POD_IP"], "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", os.environ["MOONCAKE_MASTER"]) == 0
assert {store.put(key, b"x" * 1000) for key in sys.argv[1:]} == {0}
store.close()
"""


def test_old_generation_is_purged_through_the_stores_own_pods(place: Place) -> None:
    """Keys are listed through the API server; this machine cannot reach the master, so a command for a pod is given."""
    prefix = place.kubectl.get("kvsharepool", "demo")["status"]["cacheNamespace"]
    place.kubectl.run("exec", f"{NODES}-0", "--", "python3", "-c", STORE_KEYS, *block_keys(prefix, 3), "not/ours")
    place.kubectl.run("patch", "kvsharepool", "demo", "--type=merge", '--patch={"spec":{"model":{"generation":2}}}')
    asked = kvshare(place, "purge", "-o", "json")
    assert asked.returncode == 0, asked.stderr
    rows = [(row["prefix"], row["objects"], row["bytes"], row["state"]) for row in json.loads(asked.stdout)["rows"]]
    assert rows == [(prefix, 6, 6000, "old"), (prefix, 1, 1000, "old")]
    time.sleep(15)  # to ask for a size is a read, whose lease must end
    told = kvshare(place, "purge", "--delete", "--yes", "-o", "json")
    (command,) = json.loads(told.stdout)["commands"]
    environment = {**os.environ, "PATH": search_path(), "KUBECONFIG": str(place.kubectl.kubeconfig)}
    ran = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert "REMOVED [7]" in ran.stdout, ran.stderr
    assert place.keys() == {"not/ours"}


def kvshare(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a person of this machine would."""
    code = "from kvshare_operator.cli.main import main; main()"
    environment = {**os.environ, "KUBECONFIG": str(place.kubectl.kubeconfig)}
    command = [sys.executable, "-c", code, *words, "-n", NAMESPACE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_engine_finds_in_the_store_what_its_former_pod_computed(place: Place) -> None:
    """Saved through the injected address; a new pod with an empty cache reads all whole blocks."""
    place.kubectl.apply(engines.deployment(ENGINE, place.on, Settings(prefill_sizes=(2,), decode_sizes=(1,))))
    place.kubectl.wait_for_deployment(ENGINE.name, seconds=600)
    ANSWERS[1] = place.saved(salt=1)
    answer = place.fresh_engine().complete(text_tokens(PROMPT_TOKENS, salt=1))
    assert answer.cached_tokens == REUSABLE
    assert answer.token_ids == ANSWERS[1]


def test_controller_writes_nothing_while_the_store_is_steady(place: Place) -> None:
    """By its own count, over more than one full pass, beside real controllers and kubelets."""
    controller = Server(f"http://{place.on.kubectl.within(product.NAMESPACE).pod_ip(CONTROLLER)}:8080")
    before = controller.metric("kvshare_operator_store_writes_total")
    time.sleep(FULL_PASS_SECONDS + 5)
    assert controller.metric("kvshare_operator_store_writes_total") == before


def test_killed_node_costs_no_answer_and_its_replacement_is_used(place: Place) -> None:
    """What it held is computed again."""
    place.kill(f"{NODES}-0")
    answer = place.engine().complete(text_tokens(PROMPT_TOKENS, salt=2))
    assert len(answer.token_ids) == 16
    place.wait_for_store(1)
    ANSWERS[3] = place.saved(salt=3)


def test_killed_master_costs_the_cache_and_no_answer(place: Place) -> None:
    """Node and engine connect again by themselves."""
    (master,) = [one["metadata"]["name"] for one in place.kubectl.list("pods") if MASTER in one["metadata"]["name"]]
    place.kill(master)
    assert place.engine().complete(text_tokens(PROMPT_TOKENS, salt=3)).token_ids == ANSWERS[3]
    place.wait_for_store(1)
    node = place.kubectl.get("pod", f"{NODES}-0")
    assert node["status"]["containerStatuses"][0]["restartCount"] == 0
    place.saved(salt=4)


def test_store_grows_and_shrinks_without_touching_master_and_engine(place: Place) -> None:
    """The engine's pod and the master's are the same ones afterwards; no member is outdated."""
    before = {one["metadata"]["name"] for one in place.kubectl.list("pods")}
    place.apply_pool(2)
    place.wait_for_store(2)
    place.apply_pool(1)
    place.wait("one node is left", lambda: {p["metadata"]["name"] for p in place.kubectl.list("pods")} == before)
    place.wait_for_store(1)
    assert place.kubectl.get("kvsharepool", "demo")["status"]["members"]["outdated"] == 0


def test_store_goes_with_its_pool_and_the_engine_goes_on(place: Place) -> None:
    """Nothing is left, nobody waits, answers still come."""
    place.kubectl.delete("kvsharepool", "demo")
    selector = f"{names.STORE}=demo"
    place.kubectl.wait_for("the store is gone", lambda: not place.kubectl.list(KINDS, selector), seconds=90)
    assert len(place.engine().complete(text_tokens(PROMPT_TOKENS, salt=5)).token_ids) == 16
