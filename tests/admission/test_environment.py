"""Environment variables: what is added, what is kept in order, what cannot be shared with."""

from __future__ import annotations

import pytest

from pods import Json, annotated, engine_of, injected, pod_p0, pool_p1, refused, script_pod, variables

REFERENCE = {"configMapKeyRef": {"name": "c", "key": "k"}}


def test_image_delivery_sets_no_python_path() -> None:
    """B29: the image has the code; nothing is to be found elsewhere."""
    assert variables(engine_of(injected(pod_p0(), pool_p1(connector={"source": "Image"})))) == {}


def test_python_path_of_the_image_is_said_to_be_hidden_until_it_is_named() -> None:
    """B29: the webhook cannot see the image; the annotation joins its value."""
    outcome = injected(pod_p0())
    assert variables(engine_of(outcome))["PYTHONPATH"] == "/opt/kvshare"
    assert any("PYTHONPATH" in warning for warning in outcome.warnings)
    joined = injected(annotated(pod_p0(), image_pythonpath="/app:/lib"))
    assert variables(engine_of(joined))["PYTHONPATH"] == "/opt/kvshare:/app:/lib"
    assert not any("PYTHONPATH" in warning for warning in joined.warnings)


def test_python_path_of_the_pod_is_joined_in_its_place() -> None:
    """B29, B34: the user's value stays, behind ours; a second pass changes nothing."""
    pod = pod_p0(env=[{"name": "PYTHONPATH", "value": "/app"}, {"name": "B", "value": "$(PYTHONPATH)"}])
    container = engine_of(injected(pod))
    assert [entry["name"] for entry in container["env"]] == ["PYTHONPATH", "B"]
    assert variables(container)["PYTHONPATH"] == "/opt/kvshare:/app"


def test_python_path_by_reference_is_refused() -> None:
    """Nothing can be joined to a value that is not known."""
    assert refused(pod_p0(env=[{"name": "PYTHONPATH", "valueFrom": REFERENCE}])).code == "EnvConflict"


def test_seed_in_one_member_is_injected_with_a_warning() -> None:
    """B31, B32: it splits a pool unless all have it; the fingerprint shows that later."""
    for entry in ({"value": "7"}, {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}):
        outcome = injected(pod_p0(env=[{"name": "PYTHONHASHSEED", **entry}]))
        assert any("PYTHONHASHSEED" in warning for warning in outcome.warnings)


def test_random_seed_is_refused() -> None:
    """B32: no two processes would agree on one hash."""
    assert refused(pod_p0(env=[{"name": "PYTHONHASHSEED", "value": "random"}])).code == "SeedConflict"


@pytest.mark.parametrize(
    "setting",
    ["export PYTHONHASHSEED={};", "PYTHONHASHSEED={}", "env PYTHONHASHSEED={}", "PYTHONHASHSEED={} exec"],
)
def test_seed_that_a_command_line_sets_is_seen_too(setting: str) -> None:
    """B31, B32: in a script, or by `env` in front of vLLM."""
    script = f"{setting} vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"
    assert refused(script_pod(script.format("random"))).code == "SeedConflict"
    said = [text for text in injected(script_pod(script.format("7"))).warnings if "PYTHONHASHSEED" in text]
    assert said == ["PYTHONHASHSEED=7: every member of the pool needs the same value"]
    direct = pod_p0(command=["env", "PYTHONHASHSEED=random", "vllm", "serve", "org/m"])
    assert refused(direct).code == "SeedConflict"
    elsewhere = script_pod("PYTHONHASHSEED=7 python prepare.py; vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS")
    assert not [text for text in injected(elsewhere).warnings if "PYTHONHASHSEED" in text]


def test_user_entries_keep_their_order_and_ours_come_last() -> None:
    """B34, B37: kubernetes resolves `$(X)` from earlier entries only."""
    env = [{"name": "LWS_LEADER_ADDRESS", "value": "a"}, {"name": "B", "value": "$(LWS_LEADER_ADDRESS):1"}]
    container = engine_of(injected(pod_p0(env=env)))
    assert container["env"][:2] == env
    assert [entry["name"] for entry in container["env"][2:]] == ["PYTHONPATH"]


def test_our_variable_with_another_value_is_refused() -> None:
    """We cannot fill what the user has filled."""
    pod = script_pod("vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS", env=[{"name": "KVSHARE_VLLM_ARGS", "value": "--x"}])
    assert refused(pod).code == "EnvConflict"


def test_layer_partition_is_warned_about() -> None:
    """No other pod can know it."""
    outcome = injected(pod_p0(env=[{"name": "VLLM_PP_LAYER_PARTITION", "value": "3,5"}]))
    assert any("VLLM_PP_LAYER_PARTITION" in warning for warning in outcome.warnings)


def test_every_delivery_but_the_image_sets_or_joins_python_path() -> None:
    """B29: init container and image volume alike; with the annotation, or the pod's own value, nothing is hidden."""
    for source in ("InitContainer", "ImageVolume"):
        pool = pool_p1(connector={"source": source})
        bare = injected(pod_p0(), pool)
        assert variables(engine_of(bare))["PYTHONPATH"] == "/opt/kvshare"
        assert any("image-pythonpath" in warning for warning in bare.warnings)
        assert not injected(annotated(pod_p0(), image_pythonpath="/app"), pool).warnings
        own = injected(pod_p0(env=[{"name": "PYTHONPATH", "value": "/app"}]), pool)
        assert variables(engine_of(own))["PYTHONPATH"] == "/opt/kvshare:/app"
        assert not own.warnings


def test_values_with_references_stand_behind_what_they_refer_to() -> None:
    """B34: a value of ours that holds the user's `$(X)` stays in the user's place, so X is known there."""
    env = [{"name": "APP", "value": "/app"}, {"name": "PYTHONPATH", "value": "$(APP)/lib"}, {"name": "Z", "value": "z"}]
    entries = engine_of(injected(pod_p0(env=env)))["env"]
    assert [entry["name"] for entry in entries] == ["APP", "PYTHONPATH", "Z"]
    assert entries[1]["value"] == "/opt/kvshare:$(APP)/lib"
    script = script_pod("vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS", env=env)
    assert "$(" not in variables(engine_of(injected(script)))["KVSHARE_VLLM_ARGS"]


def test_no_variable_is_set_twice() -> None:
    """B37: also on the second pass, and beside what LeaderWorkerSet has put in front."""
    env = [{"name": "LWS_LEADER_ADDRESS", "value": "a"}, {"name": "RAY", "value": "$(LWS_LEADER_ADDRESS):6379"}]
    once = injected(script_pod("vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS", env=env))
    twice = injected(once.pod)
    names = [entry["name"] for entry in engine_of(twice)["env"]]
    assert names == ["LWS_LEADER_ADDRESS", "RAY", "PYTHONPATH", "KVSHARE_VLLM_ARGS"]


def test_seed_that_everybody_has_or_that_is_empty_says_no_more_than_that() -> None:
    """B31, B32: an empty value is Python's default; `0` is a seed like any other."""
    assert not [w for w in injected(pod_p0(env=[{"name": "PYTHONHASHSEED", "value": ""}])).warnings if "SEED" in w]
    (warning,) = [w for w in injected(pod_p0(env=[{"name": "PYTHONHASHSEED", "value": "0"}])).warnings if "SEED" in w]
    assert "PYTHONHASHSEED=0" in warning


def test_of_a_variable_that_stands_twice_the_last_one_counts() -> None:
    """B37: the API server takes repeated names, and the kubelet the last of them."""
    twice = [{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "/b"}]
    entries = engine_of(injected(pod_p0(env=twice)))["env"]
    assert [entry["value"] for entry in entries] == ["/a", "/opt/kvshare:/b"]
    last = [{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "valueFrom": REFERENCE}]
    assert refused(pod_p0(env=last)).code == "EnvConflict"
    script = "vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"
    ours = variables(engine_of(injected(script_pod(script))))["KVSHARE_VLLM_ARGS"]
    other = [{"name": "KVSHARE_VLLM_ARGS", "value": ours}, {"name": "KVSHARE_VLLM_ARGS", "value": "--x"}]
    assert refused(script_pod(script, env=other)).code == "EnvConflict"


LOSES: dict[str, Json] = {
    "env sets it": pod_p0(command=["env", "PYTHONPATH=/app", "vllm", "serve", "org/m"]),
    "env removes it": pod_p0(command=["env", "-u", "PYTHONPATH", "vllm", "serve", "org/m"]),
    "env removes it, in one word": pod_p0(
        command=["tini", "--", "env", "--unset=PYTHONPATH", "vllm", "serve", "org/m"]
    ),
    "a script exports it": script_pod("export PYTHONPATH=/app\nvllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"),
    "a script sets it": script_pod("A=1 PYTHONPATH=/app; vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"),
    "a script unsets it": script_pod("unset PYTHONPATH; vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"),
    "a script sets it for vLLM": script_pod("PYTHONPATH=/app exec vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"),
    "env in a script": script_pod("env A=b PYTHONPATH=/app vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"),
    "env in a script removes it": script_pod("env -u PYTHONPATH vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS"),
    "in eval": script_pod('eval "export PYTHONPATH=/app; vllm serve org/m -tp 2 $@"'),
    "beside arguments that go on": script_pod('PYTHONPATH=/app vllm serve org/m -tp 2 "$@"'),
    "for another script": annotated(
        script_pod("PYTHONPATH=/app ./run.sh $KVSHARE_VLLM_ARGS"), tensor_parallel_size="2"
    ),
    "in a worker of Ray": script_pod("export PYTHONPATH=/app; ray start --address=leader:6379 --block"),
}


@pytest.mark.parametrize("pod", LOSES.values(), ids=LOSES.keys())
def test_command_that_hides_the_connectors_folder_is_refused(pod: Json) -> None:
    """B29: an engine that is told to load a connector, and cannot find its code, does not start."""
    assert refused(pod).code == "EnvConflict"
    assert injected(pod, pool_p1(connector={"source": "Image"}))


KEEPS = {
    "joined": "export PYTHONPATH=$PYTHONPATH:/app; vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
    "joined, quoted": 'export PYTHONPATH="/app:${PYTHONPATH}"; vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS',
    "joined when it is set": "PYTHONPATH=/app${PYTHONPATH:+:$PYTHONPATH} vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
    "appended": "PYTHONPATH+=:/app; vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
    "with our folder": "PYTHONPATH=/opt/kvshare:/app vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
    "by env": "env PYTHONPATH=/app:$PYTHONPATH vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
    "for another program": "PYTHONPATH=/app python3 prepare.py; vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
    "another variable": "export MYPYTHONPATH=/app; vllm serve org/m -tp 2 $KVSHARE_VLLM_ARGS",
}


@pytest.mark.parametrize("script", KEEPS.values(), ids=KEEPS.keys())
def test_script_that_keeps_the_connectors_folder_is_injected(script: str) -> None:
    """B29: what stays in PYTHONPATH is found."""
    assert injected(script_pod(script))


def test_env_in_front_of_vllm_may_refer_to_the_value_of_the_container() -> None:
    """B29: the kubelet fills `$(PYTHONPATH)` in, with our folder in it."""
    assert injected(pod_p0(command=["env", "PYTHONPATH=/app:$(PYTHONPATH)", "vllm", "serve", "org/m"]))
