"""The objects of a managed store: as written in `testdata`, valid for every name, with the memory that they need.

After a wanted change: `KVSHARE_WRITE_TESTDATA=1 pytest tests/managed_store/test_manifests.py`, and read the difference.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvshare_operator.api.pool import read_spec
from kvshare_operator.core.pool.resolve import resolve
from kvshare_operator.core.pool.view import view
from kvshare_operator.core.quantity import MIB, as_quantity, bytes_of
from kvshare_operator.core.store import identity, master
from kvshare_operator.core.store.objects import object_path, says, store_objects
from kvshare_operator.core.store.plan import GIB, master_limit, node_memory
from kvshare_operator.core.store.settings import StoreSettings
from managed_pools import CASES, outcome, plan, pool
from pods import Json, pool_p1

TESTDATA = pathlib.Path(__file__).parent / "testdata"


@pytest.mark.parametrize("name", CASES)
def test_objects_are_those_of_the_file(name: str) -> None:
    """Every field, read by people."""
    made, settings = CASES[name]
    found = list(store_objects(plan(made, settings)))
    path = TESTDATA / f"{name}.yaml"
    if os.environ.get("KVSHARE_WRITE_TESTDATA"):
        path.write_text(yaml.safe_dump_all(found, sort_keys=False, width=110))
    assert found == list(yaml.safe_load_all(path.read_text()))


LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


@given(NAMES)
def test_names_are_valid_for_every_pool(name: str) -> None:
    """Services start with a letter; a StatefulSet's revision label still fits into 63 characters."""
    for component in ("master", "nodes"):
        made = identity.store_name(name, component)
        assert LABEL.fullmatch(made)
        assert len(f"{made}-0123456789") <= 63
        assert all(len(value) <= 63 for value in identity.labels(name, component).values())


@given(NAMES, NAMES)
def test_names_of_two_pools_differ(one: str, other: str) -> None:
    """Also of long ones that begin alike."""
    long = [("x" * 50 + name)[:63].rstrip("-") for name in (one, other)]
    for pair in ((one, other), long):
        if pair[0] != pair[1]:
            assert identity.store_name(pair[0], "master") != identity.store_name(pair[1], "master")


@given(st.integers(min_value=16, max_value=2**23))
def test_memory_is_capacity_buffer_and_a_tenth_but_at_least_one_gibibyte(capacity_mib: int) -> None:
    """Requests equal limits, in whole MiB, in the form in which the API server stores them."""
    capacity = capacity_mib * MIB
    memory = node_memory(capacity)
    exact = capacity + 64 * MIB + max(GIB, capacity / 10)
    assert exact <= memory < exact + MIB
    assert bytes_of(as_quantity(memory)) == memory


@pytest.mark.parametrize(
    ("text", "size"),
    [("256Mi", 256 * MIB), ("1G", 10**9), ("1.5Gi", 1536 * MIB), ("1e9", 10**9), ("1E", 10**18), ("2E3", 2000)],
)
def test_quantities_of_every_form_are_read(text: str, size: int) -> None:
    """Whatever the API server takes for memory."""
    assert bytes_of(text) == size


def test_text_that_is_no_quantity_says_what_is_expected() -> None:
    """Given and expected."""
    with pytest.raises(ValueError, match="a quantity such as 256Mi expected"):
        bytes_of("1 Gi")


def test_memory_of_a_node_is_requested_and_limited_alike() -> None:
    """A node is never killed for its neighbours' memory."""
    for one in store_objects(plan()):
        if one["kind"] == "StatefulSet":
            resources = one["spec"]["template"]["spec"]["containers"][0]["resources"]
            wanted = as_quantity(node_memory(GIB))
            assert resources["requests"]["memory"] == resources["limits"]["memory"] == wanted


@given(st.integers(min_value=16, max_value=2**23))
def test_master_may_use_more_with_larger_nodes_within_bounds(capacity_mib: int) -> None:
    """Between one and sixteen gibibytes."""
    assert GIB < master_limit(capacity_mib * MIB) <= 16 * GIB


def test_number_of_nodes_changes_the_stateful_set_only() -> None:
    """Another template of the master would restart it, and empty the cache."""
    small, large = (store_objects(plan(pool({"nodes": count}))) for count in (1, 256))
    assert [one["kind"] for one, other in zip(small, large, strict=True) if one != other] == ["StatefulSet"]


@pytest.mark.parametrize("name", CASES)
def test_pods_pass_the_restricted_standard(name: str) -> None:
    """Except for the capability that RDMA asks for; no token, no service links, no root."""
    made, settings = CASES[name]
    for thing in store_objects(plan(made, settings)):
        if thing["kind"] not in ("Deployment", "StatefulSet"):
            continue
        spec = thing["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        (container,) = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        added = container["securityContext"]["capabilities"].get("add", [])
        assert added == (["IPC_LOCK"] if name == "rdma" and thing["kind"] == "StatefulSet" else [])


def test_everything_belongs_to_the_pool_and_nothing_holds_its_deletion() -> None:
    """Deleted with it, without a finalizer."""
    for thing in store_objects(plan()):
        (owner,) = thing["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["blockOwnerDeletion"]) == ("KVSharePool", "pool-uid", False)
        assert "finalizers" not in thing["metadata"]


def test_dangerous_http_port_is_open_for_the_controller_only() -> None:
    """Mooncake's `remove_all` needs no password."""
    for thing in store_objects(plan()):
        if thing["kind"] == "Service":
            closed = {identity.METRICS_PORT, identity.REST_PORT}
            assert not closed & {port["port"] for port in thing["spec"]["ports"]}
        if thing["kind"] != "NetworkPolicy":
            continue
        for rule in thing["spec"]["ingress"]:
            if any(port["port"] == identity.METRICS_PORT for port in rule["ports"]):
                (source,) = rule["from"]
                assert source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
            assert all(port["port"] != identity.REST_PORT for port in rule["ports"])


def test_flags_of_the_master_are_written_explicitly() -> None:
    """Another Mooncake version keeps our behaviour."""
    flags = {flag.partition("=")[0] for flag in master.FLAGS}
    wanted = {"--rpc_address", "--rpc_port", "--metrics_port", "--rpc_thread_num", "--client_ttl"}
    assert wanted | {"--default_kv_lease_ttl", "--eviction_high_watermark_ratio", "--eviction_ratio"} <= flags


def test_members_get_the_masters_address_before_anything_runs() -> None:
    """It follows from the pool's name alone, so webhook, controller and command line agree."""
    made = pool()
    resolved = resolve("ns-a", "p1", read_spec(made["spec"]))
    assert resolved.mistakes == ()
    assert resolved.master_address == plan().address == "kvs-p1-master.ns-a.svc:50051"


def test_scaling_a_store_outdates_no_member() -> None:
    """Members get its address only."""
    small, large = view(pool(), "i"), view(pool({"nodes": 9, "capacityPerNode": "2Gi"}), "i")
    assert small.revision == large.revision
    assert small.revision != view(pool_p1(), "i").revision


REFUSED: dict[str, tuple[Json, StoreSettings, str, str]] = {
    "no image anywhere": (pool(), StoreSettings(), "StoreImageMissing", "managedStore.image"),
    "a capacity of nothing": (pool({"capacityPerNode": "1Mi"}), StoreSettings(image="i"), "SpecInvalid", "16Mi to 8Pi"),
    "a capacity beyond all machines": (
        pool({"capacityPerNode": "9Pi"}), StoreSettings(image="i"), "SpecInvalid", "16Mi to 8Pi",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("made", "settings", "code", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_store_that_cannot_be_planned_says_why(made: Json, settings: StoreSettings, code: str, words: str) -> None:
    """With the field and what to do."""
    found = outcome(made, settings)
    assert (found.code, words in found.sentence()) == (code, True)  # type: ignore[union-attr]


def test_stored_object_with_defaults_and_others_additions_says_the_same() -> None:
    """The API server and other owners add; only what we say is compared."""
    wanted = store_objects(plan())[3]
    stored = yaml.safe_load(yaml.safe_dump(wanted))
    stored["status"] = {"readyReplicas": 1}
    stored["metadata"]["labels"]["team"] = "x"
    container = stored["spec"]["template"]["spec"]["containers"][0]
    container["env"].insert(0, {"name": "ADDED", "value": "1"})
    container["terminationMessagePath"] = "/dev/termination-log"
    assert says(stored, wanted)


EDITS: dict[str, Any] = {
    "a flag": lambda one: one["spec"]["template"]["spec"]["containers"][0]["args"].pop(),
    "an argument more": lambda one: one["spec"]["template"]["spec"]["containers"][0]["args"].append("--x"),
    "replicas": lambda one: one["spec"].update(replicas=0),
    "a label": lambda one: one["metadata"]["labels"].pop("kvshare.dev/store"),
    "the owner": lambda one: one["metadata"].update(ownerReferences=[]),
    "a variable": lambda one: one["spec"]["template"]["spec"]["containers"][0]["env"].clear(),
    "what we no longer want": lambda one: one["metadata"]["annotations"].update({"kvshare.dev/applied": "old"}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_edit_by_hand_is_noticed(edit: Any) -> None:
    """Whatever of ours was changed."""
    wanted = store_objects(plan())[3]
    stored = yaml.safe_load(yaml.safe_dump(wanted))
    edit(stored)
    assert not says(stored, wanted)


def test_every_object_has_a_path_of_its_own() -> None:
    """Two objects of one kind have two names."""
    paths = [object_path(one) for one in store_objects(plan())]
    assert len(set(paths)) == len(paths) == 7
