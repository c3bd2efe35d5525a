"""The CRD and pools on a real kube-apiserver: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import copy
import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvshare_operator.api.pool import read_spec
from pods import Json, pool_p1
from testbed.cluster import Cluster, api_server
from testbed.kubectl import KubectlError

pytestmark = pytest.mark.apiserver
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def api() -> Iterator[Cluster]:
    """An API server that knows the resource."""
    with (
        tempfile.TemporaryDirectory(prefix="kvshare-api-") as folder,
        api_server(pathlib.Path(folder) / "s") as running,
    ):
        running.kubectl.apply((ROOT / "crds" / "kvshare.dev_kvsharepools.yaml").read_text())
        running.kubectl.run("wait", "--for=condition=Established", "crd/kvsharepools.kvshare.dev", "--timeout=30s")
        yield running


def named(name: str, **spec: Any) -> Json:
    """Pool p1 under another name in the default namespace."""
    pool = pool_p1(**spec)
    pool["metadata"] = {"name": name, "namespace": "default"}
    return pool


def test_minimal_pool_gets_all_defaults(api: Cluster) -> None:
    """What the API server stores is what the models read."""
    api.kubectl.apply(named("minimal", decode=None))
    stored = api.kubectl.get("kvsharepool", "minimal")
    assert stored["spec"]["cache"] == {"blockSizeTokens": 16, "hashAlgorithm": "sha256_cbor"}
    assert stored["spec"]["pipelineParallelSizes"] == [1]
    assert stored["spec"]["connector"]["stagingMemoryPerRank"] == "256Mi"
    assert read_spec(stored["spec"]) == read_spec(named("minimal", decode=None)["spec"])


FULL = """
model: {name: meta-llama/Llama-3.3-70B-Instruct, revision: 6f6073b4, paths: [/mnt/models], generation: 1, kvHeads: 8}
prefill: {tensorParallelSizes: [4, 2]}
decode: {tensorParallelSizes: [2], saveDecodeCache: Enabled}
reservedTensorParallelSizes: [8]
pipelineParallelSizes: [1]
storeTPSize: 8
cache: {blockSizeTokens: 16, dtype: auto, hashAlgorithm: sha256_cbor}
store:
  type: Managed
  protocol: RDMA
  managed: {nodes: 4, capacityPerNode: 256Gi, image: "registry.corp/mooncake-store:0.3.13", nodeSelector: {pool: kv}}
  rdma: {resourceName: rdma/hca}
connector:
  source: InitContainer
  image: registry.corp/kvshare-connector:0.1.0
  imagePullSecrets: [{name: corp}]
  stagingMemoryPerRank: 256Mi
  onExistingConnector: Replace
onConflict: Skip
"""


def test_full_pool_is_accepted(api: Cluster) -> None:
    """Every field of the design."""
    pool = named("full")
    pool["spec"] = yaml.safe_load(FULL)
    api.kubectl.apply(pool)
    stored = api.kubectl.get("kvsharepool", "full")["spec"]
    assert stored["store"]["rdma"] == {"resourceName": "rdma/hca", "resourceCount": 1, "ipcLock": "Enabled"}


EXTERNAL = {"type": "External"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no sizes": ({"prefill": {"tensorParallelSizes": []}}, "tensorParallelSizes"),
    "a size of zero": ({"prefill": {"tensorParallelSizes": [0]}}, "greater than or equal to 1"),
    "sizes as text": ({"prefill": {"tensorParallelSizes": "4,2"}}, "tensorParallelSizes"),
    "a bool for a size": ({"prefill": {"tensorParallelSizes": [True]}}, "numeric"),
    "a size twice": ({"prefill": {"tensorParallelSizes": [2, 2]}}, "duplicate"),
    "too many sizes": ({"prefill": {"tensorParallelSizes": list(range(1, 20))}}, "16"),
    "a size that vLLM cannot split": ({"prefill": {"tensorParallelSizes": [3]}}, "vLLM cannot split"),
    "a pin that is no multiple": ({"storeTPSize": 2}, "multiple of every listed size"),
    "a pin that does not divide the heads": (
        {"storeTPSize": 16},
        "storeTPSize must divide model.kvHeads",
    ),
    "no store": ({"store": None}, "store"),
    "the wrong member of store": (
        {"store": {"type": "External", "managed": {"capacityPerNode": "1Gi"}}},
        "set exactly the member that type names",
    ),
    "an address without a port": (
        {"store": {**EXTERNAL, "external": {"masterAddress": "mooncake-master"}}},
        "masterAddress",
    ),
    "a doubled port": ({"store": {**EXTERNAL, "external": {"masterAddress": "h:50051:50051"}}}, "masterAddress"),
    "a capacity without a unit": (
        {"store": {"type": "Managed", "managed": {"capacityPerNode": "5"}}},
        "a quantity of at least 256Mi",
    ),
    "rdma without the protocol": (
        {
            "store": {
                **EXTERNAL,
                "external": {"masterAddress": "h:1"},
                "rdma": {"resourceName": "rdma/hca"},
            }
        },
        "rdma needs protocol RDMA",
    ),
    "a model with blanks": ({"model": {"name": "my model"}}, "model.name"),
    "an unknown hash": ({"cache": {"hashAlgorithm": "xxhash"}}, "hashAlgorithm"),
    "an unknown conflict rule": ({"onConflict": "Maybe"}, "onConflict"),
}


@pytest.mark.parametrize(("spec", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_pool_that_breaks_a_rule_is_refused_at_apply(api: Cluster, spec: dict[str, Any], words: str) -> None:
    """With words that say what is expected."""
    with pytest.raises(KubectlError) as caught:
        api.kubectl.apply(named("refused", **spec))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "address", ["mooncake-master:50051", "[fd00::1]:50051", "etcd://a:2379,b:2379", "m.x.svc.cluster.local:1"]
)
def test_address_of_every_form_is_accepted(api: Cluster, address: str) -> None:
    """B64."""
    store = {"type": "External", "external": {"masterAddress": address}}
    api.kubectl.run("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(named("addresses", store=store)))


@pytest.mark.parametrize(("name", "words"), [("p" * 64, "at most 63 characters"), ("a.b", "no dots")])
def test_name_that_is_no_label_is_refused(api: Cluster, name: str, words: str) -> None:
    """B09."""
    with pytest.raises(KubectlError, match=words):
        api.kubectl.apply(named(name))
    api.kubectl.apply(named("p" * 63))


IMMUTABLE: dict[str, tuple[dict[str, Any], str]] = {
    "the model's name": ({"model": {"name": "org/other", "kvHeads": 8}}, "immutable"),
    "a new revision": ({"model": {"name": "org/m", "kvHeads": 8, "revision": "r"}}, "immutable"),
    "a lower generation": ({"model": {"name": "org/m", "kvHeads": 8, "generation": 1}}, "generation only grows"),
    "the block size": ({"cache": {"blockSizeTokens": 32}}, "immutable"),
    "the hash": ({"cache": {"hashAlgorithm": "sha256"}}, "immutable"),
    "a dtype": ({"cache": {"dtype": "fp8"}}, "immutable"),
    "the store's type": ({"store": {"type": "Managed", "managed": {"capacityPerNode": "1Gi"}}}, "type is immutable"),
}


@pytest.mark.parametrize(("spec", "words"), IMMUTABLE.values(), ids=IMMUTABLE.keys())
def test_what_decides_bytes_cannot_be_edited(api: Cluster, spec: dict[str, Any], words: str) -> None:
    """Another pool, or a higher generation."""
    first = {"model": {"name": "org/m", "kvHeads": 8, "generation": 2}}
    api.kubectl.apply(named("fixed", **first))
    with pytest.raises(KubectlError, match=words):
        api.kubectl.apply(named("fixed", **{**first, **spec}))


def test_edit_that_would_move_store_tp_is_refused_unless_it_is_pinned(api: Cluster) -> None:
    """Sticky: the rule reads the status. Removing a size, or one above the heads, moves nothing."""
    model = {"name": "org/m"}
    api.kubectl.apply(named("sticky", model=model))
    patch = json.dumps({"status": {"storeTPSize": 4, "kvHeads": 4}})
    api.kubectl.run("patch", "kvsharepool", "sticky", "--subresource=status", "--type=merge", "-p", patch)
    with pytest.raises(KubectlError, match="would move Store TP"):
        api.kubectl.apply(named("sticky", model=model, prefill={"tensorParallelSizes": [3]}))
    api.kubectl.apply(named("sticky", model=model, prefill={"tensorParallelSizes": [4, 8]}))
    api.kubectl.apply(named("sticky", model=model, prefill={"tensorParallelSizes": [2]}))
    api.kubectl.apply(named("sticky", model=model, prefill={"tensorParallelSizes": [8]}, storeTPSize=8))


def test_columns_of_kubectl_get(api: Cluster) -> None:
    """What people see first."""
    api.kubectl.apply(named("columns"))
    header = api.kubectl.run("get", "kvsp", "columns", "-o", "wide").splitlines()[0].split()
    assert header[1:9] == ["STORETP", "PREFILL", "DECODE", "MEMBERS", "SHARED", "READY", "REASON", "AGE"]
    assert header[9:] == ["OUTDATED", "NAMESPACE", "REVISION"]
    assert copy.deepcopy(header)[0] == "NAME"
