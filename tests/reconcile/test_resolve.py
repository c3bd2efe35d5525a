"""What a pool resolves to: Store TP and its stickiness, the namespace, addresses, the revision."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_operator.api.pool import read_spec
from kvshare_operator.api.status import Status
from kvshare_operator.core.pool.resolve import Resolution, full_address, resolve
from kvshare_operator.core.pool.view import connector_image, view
from pods import pool_p1


def resolved(status: Status | None = None, **spec: Any) -> Resolution:
    """Resolve pool p1 with other fields."""
    return resolve("ns-a", "p1", read_spec(pool_p1(**spec)["spec"]), status)


def test_store_tp_is_the_least_common_multiple_of_effective_sizes() -> None:
    """Prefill, decode and reserved sizes; sizes above the KV heads count as the KV heads."""
    assert resolved().store_tp == 4
    assert resolved(reservedTensorParallelSizes=[8]).store_tp == 8
    assert resolved(model={"name": "org/m", "kvHeads": 4}, prefill={"tensorParallelSizes": [8, 2]}).store_tp == 4
    assert resolved(model={"name": "org/m", "kvHeads": 1}).store_tp == 1


def test_unknown_heads_give_the_plain_multiple_marked_provisional() -> None:
    """Until a member reports."""
    found = resolved(model={"name": "org/m"}, prefill={"tensorParallelSizes": [8, 2]})
    assert (found.store_tp, found.provisional) == (8, True)
    learnt = resolved(Status(kv_heads=4), model={"name": "org/m"}, prefill={"tensorParallelSizes": [8, 2]})
    assert (learnt.store_tp, learnt.provisional) == (4, False)


def test_removing_a_size_does_not_move_store_tp() -> None:
    """Sticky: the cache stays."""
    found = resolved(Status(store_tp_size=4), prefill={"tensorParallelSizes": [2]})
    assert (found.store_tp, found.source) == (4, "sticky")


def test_adding_a_size_above_the_heads_does_not_move_store_tp() -> None:
    """TP 8 on 4 KV heads is effective size 4."""
    model = {"name": "org/m"}
    found = resolved(Status(store_tp_size=4, kv_heads=4), model=model, prefill={"tensorParallelSizes": [4, 8]})
    assert found.store_tp == 4


def test_pin_wins_over_what_was_before() -> None:
    """The user asked for another cache."""
    found = resolved(Status(store_tp_size=4), storeTPSize=8)
    assert (found.store_tp, found.source) == (8, "pinned")


def test_sizes_that_vllm_refuses_are_all_named() -> None:
    """Every mistake at once."""
    found = resolved(model={"name": "org/m", "kvHeads": 6}, prefill={"tensorParallelSizes": [4, 5]})
    (mistake,) = found.mistakes
    assert mistake.code == "StoreTPConflict"
    assert "TP 4" in mistake.message
    assert "TP 5" in mistake.message


@given(st.sets(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
def test_store_tp_divides_the_heads_and_is_a_multiple_of_each_effective_size(sizes: set[int], heads: int) -> None:
    """For every set of sizes that vLLM accepts."""
    found = resolved(
        model={"name": "org/m", "kvHeads": heads}, prefill={"tensorParallelSizes": sorted(sizes)}, decode=None
    )
    assert found.store_tp == math.lcm(*(min(size, heads) for size in sizes))
    assert heads % found.store_tp == 0


@pytest.mark.parametrize("wish", ["Refuse", "Compose", "Replace"])
def test_every_wish_about_an_existing_connector_is_accepted(wish: str) -> None:
    """Whether a pod can follow it is decided pod by pod."""
    assert resolved(connector={"onExistingConnector": wish}).mistakes == ()


def test_namespaces_differ_by_name_model_revision_and_generation_only() -> None:
    """B63, and the same after the pool was made again."""
    models: list[dict[str, Any]] = [
        {"name": "org/ft-a"},
        {"name": "org/ft-b"},
        {"name": "org/ft-a", "revision": "1"},
        {"name": "org/ft-a", "revision": "2"},
        {"name": "org/ft-a", "generation": 2},
    ]
    found = [resolved(model=model).cache_namespace for model in models]
    assert len(set(found)) == len(models)
    assert resolved(model=models[0]).cache_namespace == found[0]
    assert resolved(model={**models[0], "kvHeads": 8, "paths": ["/x"]}).cache_namespace == found[0]


def test_namespace_and_revision_do_not_depend_on_the_process() -> None:
    """Another hash seed, another order of keys."""
    code = (
        "import sys; sys.path[:0] = ['connector', 'operator', 'tests']\n"
        "from pods import pool_p1; from kvshare_operator.core.pool.view import view\n"
        "p = pool_p1(); p['spec'] = dict(reversed(p['spec'].items())); v = view(p, 'i')\n"
        "print(v.resolution.cache_namespace, v.revision)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = view(pool_p1(), "i")
    assert seen == {f"{here.resolution.cache_namespace} {here.revision}\n"}


ADDRESSES = {
    "mooncake-master:50051": "mooncake-master.ns-a.svc:50051",
    "mooncake-master.other.svc.cluster.local:50051": "mooncake-master.other.svc.cluster.local:50051",
    "[fd00::1]:50051": "[fd00::1]:50051",
    "etcd://a:2379,b:2379": "etcd://a:2379,b:2379",
    "localhost:1": "localhost:1",
}


@pytest.mark.parametrize(("given_address", "full"), ADDRESSES.items())
def test_address_is_the_same_for_every_member(given_address: str, full: str) -> None:
    """B64: short names become full ones of the pool's namespace."""
    assert full_address(given_address, "ns-a") == (full, [], [])


@pytest.mark.parametrize("wrong", ["mooncake-master", "h:50051:50051", "h:0", "h:70000", "etcd://a", "[fd00::1]"])
def test_address_without_a_usable_port_is_a_mistake(wrong: str) -> None:
    """Also in objects that were stored under looser rules."""
    assert full_address(wrong, "ns-a")[2]


def test_ip_address_is_warned_about() -> None:
    """A pod's address changes with its restart."""
    address, warnings, mistakes = full_address("10.0.0.7:50051", "ns-a")
    assert (address, mistakes) == ("10.0.0.7:50051", [])
    assert "IP address" in warnings[0]


def test_revision_changes_with_what_members_get_and_with_nothing_else() -> None:
    """Adding a size that fits, or another conflict rule, outdates nobody."""

    def code(**spec: Any) -> str:
        return view(pool_p1(**spec), "image:1").revision

    same = [
        code(),
        code(connector={"verify": "Size"}),
        code(onConflict="Reject"),
        code(prefill={"tensorParallelSizes": [4, 2, 1]}),
    ]
    assert len(set(same)) == 1
    external = {"type": "External", "external": {"masterAddress": "other.x.svc:1"}}
    other = [
        code(storeTPSize=8),
        code(store=external),
        code(cache={"blockSizeTokens": 32}),
        code(connector={"stagingMemoryPerRank": "1Gi"}),
        code(connector={"image": "image:2"}),
        code(connector={"verify": "Checksum"}),
        code(decode={"tensorParallelSizes": [2], "saveDecodeCache": "Enabled"}),
    ]
    assert all(a != b for a, b in itertools.combinations([same[0], *other], 2))


def test_payload_image_changes_only_with_the_spec() -> None:
    """An upgrade of the operator does not reach pods that merely move to another node."""
    spec = read_spec(pool_p1()["spec"])
    kept = Status(connector_image="image:1", observed_generation=3)
    assert connector_image(spec, kept, 3, "image:2") == "image:1"
    assert connector_image(spec, kept, 4, "image:2") == "image:2"
    own = read_spec(pool_p1(connector={"image": "mine"})["spec"])
    assert connector_image(own, kept, 3, "image:2") == "mine"
