"""Pods that configure a KV connector already: taken in as the pool asks for, or refused with the way out."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from kvshare_layout import config
from kvshare_operator.core.injection.arguments import connector_config
from kvshare_operator.core.injection.patch import difference
from kvshare_operator.core.pool.members import read_member
from kvshare_operator.core.pool.view import view
from pods import SETTINGS, annotated, engine_of, injected, pod_p0, pool_p1, refused, script_pod

COMPOSE = pool_p1(connector={"onExistingConnector": "Compose"})
REPLACE = pool_p1(connector={"onExistingConnector": "Replace"})
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
MOONCAKE = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"a": 1}}
FLAG = "--kv-transfer-config"


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    """A MultiConnector of these."""
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def pod(value: Any, *more: str) -> dict[str, Any]:
    """A pod with this value of the flag, given as JSON or as text."""
    text = value if isinstance(value, str) else json.dumps(value)
    return pod_p0(args=["-tp", "2", FLAG, text, *more])


def effective(container: dict[str, Any]) -> dict[str, Any]:
    """The value that vLLM uses, by the plain spelling."""
    place = container["args"].index(FLAG)
    found: dict[str, Any] = json.loads(container["args"][place + 1])
    return found


def children(container: dict[str, Any]) -> list[dict[str, Any]]:
    """The connectors inside MultiConnector."""
    found: list[dict[str, Any]] = effective(container)["kv_connector_extra_config"]["connectors"]
    return found


def check_ours(entry: dict[str, Any], *, beside: bool, pool: dict[str, Any]) -> None:
    """The entry is ours, with the pool's settings."""
    assert (entry["kv_connector"], entry["kv_connector_module_path"]) == (
        config.CONNECTOR_CLASS,
        config.CONNECTOR_MODULE,
    )
    read = config.parse(entry["kv_connector_extra_config"])
    assert read.mistakes == ()
    assert read.config.inside_multi_connector is beside
    plain = {**entry["kv_connector_extra_config"], "inside_multi_connector": None}
    assert config.parse(plain).config == connector_config(view(pool, ""), "both", SETTINGS)


@pytest.mark.parametrize(("verify", "mode"), [("Size", "size"), ("Checksum", "checksum")])
def test_what_proves_a_load_is_the_pools_to_say(verify: str, mode: str) -> None:
    """Every word of the resource is one that the connector knows."""
    written = connector_config(view(pool_p1(connector={"verify": verify}), ""), "both", SETTINGS)
    assert written.verify == mode
    assert config.parse(config.to_extra_config(written)).mistakes == ()


def test_a_pods_own_connector_runs_beside_ours() -> None:
    """B18: one JSON value, one list element, everything else as it was; the second run changes nothing."""
    outcome = injected(pod({**NIXL, "kv_port": 7, "engine_id": "e$"}), COMPOSE)
    container = engine_of(outcome)
    value = effective(container)
    assert (value["kv_connector"], value["kv_role"], value["kv_load_failure_policy"]) == (
        "MultiConnector", "kv_both", "recompute",
    )  # fmt: skip
    assert value["engine_id"] == "e$"
    theirs, ours = children(container)
    assert theirs == {**NIXL, "kv_port": 7}
    check_ours(ours, beside=True, pool=COMPOSE)
    assert container["args"][:3] == ["-tp", "2", FLAG]
    assert container["args"][4:] == ["--block-size=16", "--prefix-caching-hash-algo=sha256_cbor"]
    assert difference(outcome.pod, injected(outcome.pod, COMPOSE).pod) == []


def test_roles_of_both_connectors_join() -> None:
    """A consumer beside a producer makes an engine that is both."""
    decode = engine_of(injected(annotated(pod({**NIXL, "kv_role": "kv_consumer"}), role="decode"), COMPOSE))
    assert effective(decode)["kv_role"] == children(decode)[1]["kv_role"] == "kv_consumer"
    mixed = engine_of(injected(pod({**NIXL, "kv_role": "kv_producer"}), COMPOSE))
    assert effective(mixed)["kv_role"] == "kv_both"
    assert [child["kv_role"] for child in children(mixed)] == ["kv_producer", "kv_both"]


def test_an_existing_multi_connector_gets_one_more_entry() -> None:
    """Its own entries and keys stay."""
    given = multi(NIXL, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
    outcome = injected(pod({**given, "engine_id": "e"}), COMPOSE)
    container = engine_of(outcome)
    assert effective(container)["engine_id"] == "e"
    assert children(container)[:2] == given["kv_connector_extra_config"]["connectors"]
    check_ours(children(container)[2], beside=True, pool=COMPOSE)
    assert difference(outcome.pod, injected(outcome.pod, COMPOSE).pod) == []


def test_mooncakes_own_connector_is_replaced_alone_and_inside_others() -> None:
    """Users of vLLM's own store connector move over; its place in the list is kept."""
    alone = injected(pod(MOONCAKE), REPLACE)
    check_ours(effective(engine_of(alone)), beside=False, pool=REPLACE)
    assert effective(engine_of(alone))["kv_load_failure_policy"] == "recompute"
    inside = injected(pod(multi(MOONCAKE, NIXL)), REPLACE)
    ours, theirs = children(engine_of(inside))
    check_ours(ours, beside=True, pool=REPLACE)
    assert theirs == NIXL
    for outcome in (alone, inside):
        assert difference(outcome.pod, injected(outcome.pod, REPLACE).pod) == []


@pytest.mark.parametrize("spelling", ["--kv-transfer-config={}", "--kv_transfer_config={}", "--kv-transf={}"])
@pytest.mark.parametrize("field", ["args", "command"])
def test_every_spelling_and_place_is_kept(spelling: str, field: str) -> None:
    """Joined by =, with underscores, abbreviated; in args or in command; of several the last one counts."""
    old = json.dumps({"kv_connector": "Other", "kv_role": "kv_both"})
    words = [FLAG, old, spelling.format(json.dumps(NIXL, separators=(",", ":")))]
    command = ["vllm", "serve", "org/m", "-tp", "2", *(words if field == "command" else [])]
    before = pod_p0(command=command, args=words if field == "args" else None)
    outcome = injected(before, COMPOSE)
    changed = engine_of(outcome)[field]
    place = changed.index(old) + 1
    assert changed[place - 2 : place] == [FLAG, old]
    key, _, text = changed[place].partition("=")
    assert key == spelling.partition("=")[0]
    assert [child["kv_connector"] for child in json.loads(text)["kv_connector_extra_config"]["connectors"]] == [
        "NixlConnector", "KVShareConnector",
    ]  # fmt: skip
    assert difference(outcome.pod, injected(outcome.pod, COMPOSE).pod) == []


def test_a_pod_without_a_connector_gets_dotted_flags_as_ever() -> None:
    """The wish is about pods that have one."""
    for pool in (COMPOSE, REPLACE):
        args = engine_of(injected(pod_p0(), pool))["args"]
        assert "--kv-transfer-config.kv_connector=KVShareConnector" in args


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "refused by the pool": (pod(NIXL), pool_p1(), "NixlConnector"),
    "not JSON": (pod("{kv_connector:NixlConnector}"), COMPOSE, "not JSON"),
    "no object": (pod("[]"), COMPOSE, "without a kv_connector"),
    "no connector": (pod("{}"), COMPOSE, "without a kv_connector"),
    "no role": (pod({"kv_connector": "NixlConnector"}), COMPOSE, "kv_role"),
    "a second store": (pod(MOONCAKE), COMPOSE, "Replace"),
    "a second store inside": (pod(multi(NIXL, MOONCAKE)), COMPOSE, "Replace"),
    "another connector to replace": (pod(NIXL), REPLACE, "Compose"),
    "another one inside to replace": (pod(multi(NIXL)), REPLACE, "MooncakeStoreConnector"),
    "an empty list of connectors": (pod({**NIXL, "kv_connector": "MultiConnector"}), COMPOSE, "list of connectors"),
    "a list inside a list": (pod(multi(multi(NIXL))), COMPOSE, "one list"),
    "dotted flags": (
        pod_p0(args=["-tp", "2", f"{FLAG}.kv_connector=NixlConnector", f"{FLAG}.kv_role=kv_both"]), COMPOSE,
        "write all of it as one JSON value",
    ),
    "dotted flags in a script": (
        script_pod(f"vllm serve org/m -tp 2 {FLAG}.kv_connector=NixlConnector $KVSHARE_VLLM_ARGS"), COMPOSE,
        "without a shell",
    ),
    "JSON and dotted flags": (pod(NIXL, f"{FLAG}.kv_role=kv_both"), COMPOSE, "dotted"),
    "a variable": (
        pod_p0(args=["-tp", "2", FLAG, "$(KV)"], env=[{"name": "KV", "value": json.dumps(NIXL)}]), COMPOSE,
        "in one word",
    ),
    "an unknown variable": (
        pod_p0(args=["-tp", "2", FLAG, "$(KV)"], envFrom=[{"configMapRef": {"name": "c"}}]), COMPOSE,
        "in one word",
    ),
    "a script": (
        script_pod(f"vllm serve org/m -tp 2 {FLAG} '{json.dumps(NIXL)}' $KVSHARE_VLLM_ARGS"), COMPOSE,
        "shell script",
    ),
    "a script that passes its arguments on": (
        script_pod('exec vllm serve org/m "$@"', "bash", "-tp", "2", FLAG, json.dumps(NIXL)), COMPOSE,
        "shell script",
    ),
    "ours from another pool": (
        pod(multi(NIXL, {"kv_connector": "KVShareConnector", "kv_role": "kv_both"})), COMPOSE,
        "copied",
    ),
    "ours alone, written by hand": (pod({"kv_connector": "KVShareConnector", "kv_role": "kv_both"}), COMPOSE, "copied"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "pool", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_taken_in_is_refused(given: dict[str, Any], pool: dict[str, Any], words: str) -> None:
    """All or nothing, with what to change."""
    found = refused(given, pool)
    assert found.code == "FlagConflict"
    assert words in found.sentence()


def test_value_that_is_nested_without_end_is_refused() -> None:
    """A parser's depth is no fault of ours: the pod's own flag is named, with and without Compose."""
    deep = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "x": ' + "[" * 9000 + "]" * 9000 + "}"
    pod = pod_p0(args=["-tp", "2", FLAG, deep])
    assert refused(pod, COMPOSE).code == "FlagConflict"
    assert refused(pod).code == "FlagConflict"


def test_other_reasons_are_still_found() -> None:
    """A taken-in connector hides no other difference."""
    assert refused(pod(NIXL, "--block-size", "32"), COMPOSE).code == "BlockMismatch"
    assert refused(pod(NIXL, "--no-enable-prefix-caching"), COMPOSE).code == "FlagConflict"


@pytest.mark.parametrize(("value", "pool"), [(NIXL, COMPOSE), (MOONCAKE, REPLACE)])
def test_the_status_reads_such_members_too(value: dict[str, Any], pool: dict[str, Any]) -> None:
    """Store TP and namespace of a member come from its own command line."""
    member = read_member(injected(pod(value), pool).pod)
    assert member is not None
    assert member.store_tp == 4
    assert member.cache_namespace == view(pool, "").resolution.cache_namespace


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "pool"),
    [(NIXL, COMPOSE), (multi(NIXL), COMPOSE), (MOONCAKE, REPLACE), (multi(NIXL, MOONCAKE), REPLACE)],
)
def test_vllm_reads_the_effective_value(value: dict[str, Any], pool: dict[str, Any]) -> None:
    """With vLLM's own parser, its configuration class, and the children that MultiConnector makes of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.config import KVTransferConfig
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    top = FlexibleArgumentParser(prog="vllm")
    make_arg_parser(top.add_subparsers(dest="subparser").add_parser("serve"))
    words = engine_of(injected(pod({**value, "engine_id": "e"}), pool))["args"]
    parsed = top.parse_args(["serve", "org/m", *words]).kv_transfer_config
    assert isinstance(parsed, KVTransferConfig)
    assert parsed.engine_id == "e"
    assert parsed.kv_load_failure_policy == "recompute"
    assert parsed.has_connector("KVShareConnector")
    for child in parsed.kv_connector_extra_config.get("connectors", []):
        assert KVTransferConfig(**child, engine_id=parsed.engine_id).is_kv_transfer_instance
