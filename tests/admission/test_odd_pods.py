"""Pods with every optional field and strange values: injected as a whole, or refused with the reason and the remedy."""

import copy
from typing import Any

import pytest
from hypothesis import given

import odd_pods
from kvshare_operator.core.injection.inject import Injected
from pods import pod_p0, run


@given(odd_pods.odd_pods())
def test_odd_pods_are_injected_as_a_whole_or_refused_with_a_remedy(pod: dict[str, Any]) -> None:
    """Injecting is pure, and doing it again changes nothing."""
    assert not odd_pods.mistake(pod)[1]


def test_an_injection_that_goes_on_and_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees a pod that changes with every injection, is changed in place, or loses a field."""

    def adds(pod: dict[str, Any]) -> object:
        outcome = run(pod)
        assert isinstance(outcome, Injected)
        outcome.pod["spec"].setdefault("volumes", []).append({"name": "more"})
        return outcome

    def in_place(pod: dict[str, Any]) -> object:
        pod["spec"]["hostNetwork"] = True
        return run(pod)

    def forgets(pod: dict[str, Any]) -> object:
        outcome = run(pod)
        assert isinstance(outcome, Injected)
        outcome.pod["spec"]["containers"][0].pop("resources", None)
        return outcome

    assert odd_pods.mistake(pod_p0()) == (True, "")
    monkeypatch.setattr(odd_pods, "run", forgets)
    assert odd_pods.mistake(pod_p0())[1] == "pod.spec.containers[0] is not what it was"
    monkeypatch.setattr(odd_pods, "run", adds)
    assert odd_pods.mistake(pod_p0()) == (True, "not the same when it is injected again")
    monkeypatch.setattr(odd_pods, "run", in_place)
    assert odd_pods.mistake(copy.deepcopy(pod_p0()))[1] == "the pod that was given has been changed"


def test_a_half_injection_is_found() -> None:
    """A variable is what its last entry says, and flags stand once."""
    outcome = run(pod_p0())
    assert isinstance(outcome, Injected)
    engine = outcome.pod["spec"]["containers"][0]
    assert odd_pods.half_injected(outcome.pod) == ""
    engine["env"].append({"name": "PYTHONPATH", "value": "/app"})
    assert odd_pods.half_injected(outcome.pod) == "the engine does not look for the connector where it is"
    del engine["env"][-1]
    engine["args"] += [word for word in engine["args"] if ".kv_connector=" in word]
    assert odd_pods.half_injected(outcome.pod) == "the connector is not named exactly once"
    engine["volumeMounts"] = []
    assert odd_pods.half_injected(outcome.pod) == "0 containers have the connector"
