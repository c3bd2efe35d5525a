"""Environment variables: what is added, what is kept in order, what cannot be shared with."""

from __future__ import annotations

from pods import annotated, engine_of, injected, pod_p0, pool_p1, refused, script_pod, variables

REFERENCE = {"configMapKeyRef": {"name": "c", "key": "k"}}


def test_image_delivery_sets_no_python_path() -> None:
    """The image has the code; nothing is to be found elsewhere."""
    assert variables(engine_of(injected(pod_p0(), pool_p1(connector={"source": "Image"})))) == {}


def test_python_path_of_the_image_is_said_to_be_hidden_until_it_is_named() -> None:
    """The webhook cannot see the image; the annotation joins its value."""
    outcome = injected(pod_p0())
    assert variables(engine_of(outcome))["PYTHONPATH"] == "/opt/kvshare"
    assert any("PYTHONPATH" in warning for warning in outcome.warnings)
    joined = injected(annotated(pod_p0(), image_pythonpath="/app:/lib"))
    assert variables(engine_of(joined))["PYTHONPATH"] == "/opt/kvshare:/app:/lib"
    assert not any("PYTHONPATH" in warning for warning in joined.warnings)


def test_python_path_of_the_pod_is_joined_in_its_place() -> None:
    """The user's value stays, behind ours; a second pass changes nothing."""
    pod = pod_p0(env=[{"name": "PYTHONPATH", "value": "/app"}, {"name": "B", "value": "$(PYTHONPATH)"}])
    container = engine_of(injected(pod))
    assert [entry["name"] for entry in container["env"]] == ["PYTHONPATH", "B"]
    assert variables(container)["PYTHONPATH"] == "/opt/kvshare:/app"


def test_python_path_by_reference_is_refused() -> None:
    """Nothing can be joined to a value that is not known."""
    assert refused(pod_p0(env=[{"name": "PYTHONPATH", "valueFrom": REFERENCE}])).code == "EnvConflict"


def test_seed_in_one_member_is_injected_with_a_warning() -> None:
    """It splits a pool unless all have it; the fingerprint shows that later."""
    for entry in ({"value": "7"}, {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}):
        outcome = injected(pod_p0(env=[{"name": "PYTHONHASHSEED", **entry}]))
        assert any("PYTHONHASHSEED" in warning for warning in outcome.warnings)


def test_random_seed_is_refused() -> None:
    """No two processes would agree on one hash."""
    assert refused(pod_p0(env=[{"name": "PYTHONHASHSEED", "value": "random"}])).code == "SeedConflict"


def test_user_entries_keep_their_order_and_ours_come_last() -> None:
    """Kubernetes resolves `$(X)` from earlier entries only."""
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
