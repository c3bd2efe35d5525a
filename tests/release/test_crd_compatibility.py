"""Compatibility of the resource's definition: what could break somebody is found, what only adds is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from kvshare_operator.api import crd
from release import __main__ as verbs
from release.crd_compatibility import differences

FORMER = verbs.former()
OLD: dict[str, Any] = yaml.safe_load(FORMER.read_text())


def changed(change: Callable[[dict[str, Any]], object]) -> list[str]:
    """What is found when the spec's schema is changed."""
    new = copy.deepcopy(OLD)
    change(new["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    return differences(OLD, new)


def test_the_same_definition_has_no_difference() -> None:
    """And the kept one is a definition of this resource."""
    assert differences(OLD, OLD) == []
    assert OLD["spec"]["names"]["kind"] == "KVSharePool"
    assert crd.structural_schema()["properties"]["spec"]["properties"].keys() & {"model", "store"}


ADDITIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a field": lambda s: s["properties"].update(extra={"type": "string"}),
    "a required field with a default in a new object": lambda s: s["properties"].update(
        extra={"type": "object", "required": ["x"], "properties": {"x": {"type": "string", "default": "y"}}}
    ),
    "a field in the default of its object": lambda s: (
        s["properties"]["connector"]["properties"].update(extra={"type": "string", "default": "y"}),
        s["properties"]["connector"]["default"].update(extra="y"),
    ),
    "an enum value": lambda s: s["properties"]["onConflict"]["enum"].append("Warn"),
    "wider bounds": lambda s: s["properties"]["model"]["properties"]["name"].update(maxLength=1000, minLength=0),
    "a rule less": lambda s: s["properties"]["model"].pop("x-kubernetes-validations"),
    "a field that is required no more": lambda s: s["required"].remove("model"),
    "another description": lambda s: s.update(description="new words"),
}


@pytest.mark.parametrize("change", ADDITIONS.values(), ids=ADDITIONS.keys())
def test_additions_are_compatible(change: Callable[[dict[str, Any]], object]) -> None:
    """Nobody can notice them."""
    assert changed(change) == []


def _sizes(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["properties"]["prefill"]["properties"]["tensorParallelSizes"]
    return found


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a field that is gone": (lambda s: s["properties"].pop("onConflict"), "field onConflict was removed"),
    "another type": (lambda s: s["properties"]["storeTPSize"].update(type="string"), "type integer"),
    "a new required field": (
        lambda s: (s["properties"].update(extra={"type": "string"}), s["required"].append("extra")),
        "field extra became required",
    ),
    "an old field that is required now, default or not": (
        lambda s: s["required"].append("decode"), "field decode became required",
    ),
    "an enum value less": (lambda s: s["properties"]["onConflict"]["enum"].remove("Skip"), "value Skip"),
    "an enum where there was none": (
        lambda s: s["properties"]["model"]["properties"]["name"].update(enum=["a"]), "any other value",
    ),
    "narrower bounds": (
        lambda s: s["properties"]["model"]["properties"]["name"].update(maxLength=10), "maxLength 253 became 10",
    ),
    "a bound where there was none": (
        lambda s: s["properties"]["model"].update(minProperties=2), "minProperties None became 2",
    ),
    "another default": (lambda s: s["properties"]["onConflict"].update(default="Reject"), "default 'Skip'"),
    "a field with another value in the default of its object": (
        lambda s: (
            s["properties"]["connector"]["properties"].update(extra={"type": "string", "default": "y"}),
            s["properties"]["connector"]["default"].update(extra="z"),
        ),
        "default {",
    ),
    "a new rule": (
        lambda s: s.setdefault("x-kubernetes-validations", []).append({"rule": "true", "message": "be good"}),
        "new rule: be good",
    ),
    "a change inside a list": (
        lambda s: _sizes(s)["items"].update(maximum=8),
        "maximum 1024 became 8",
    ),
    "another kind of list": (
        lambda s: _sizes(s).update({"x-kubernetes-list-type": "atomic"}), "x-kubernetes-list-type",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BREAKS.values(), ids=BREAKS.keys())
def test_what_could_break_somebody_is_named(change: Callable[[dict[str, Any]], object], words: str) -> None:
    """With its place."""
    found = changed(change)
    assert found
    assert any(words in text and text.startswith("v1alpha1: spec") for text in found), found


def test_a_version_that_is_served_no_more_is_named() -> None:
    """Removed, or switched off; short names count as well."""
    removed, stopped, new = (copy.deepcopy(OLD) for _ in range(3))
    removed["spec"]["versions"].clear()
    stopped["spec"]["versions"][0]["served"] = False
    for changed_one in (removed, stopped):
        assert differences(OLD, changed_one) == ["version v1alpha1 is not served any more"]
    new["spec"]["names"]["shortNames"] = []
    assert differences(OLD, new) == ["names.shortNames: kvsp was removed"]


def test_wanted_differences_are_accepted_word_for_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """One line each; anything else still fails."""
    new = copy.deepcopy(OLD)
    new["spec"]["names"]["shortNames"] = []
    new["spec"]["scope"] = "Cluster"
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(new))
    (tmp_path / "accepted.txt").write_text("# why\nnames.shortNames: kvsp was removed\n")
    monkeypatch.setattr(verbs, "CRD", tmp_path / "crd.yaml")
    monkeypatch.setattr(verbs, "ACCEPTED", tmp_path / "accepted.txt")
    assert verbs.resource_problems() == [f"{FORMER.stem}: scope: Namespaced became Cluster"]


def test_this_checkouts_definition_fits_the_previous_release() -> None:
    """As `make release-check` asks, so that a break shows with the change that makes it."""
    assert verbs.resource_problems() == []
