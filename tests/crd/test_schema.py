"""The generated CRD: structural, bounded, by Kubernetes' API conventions, and up to date."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvshare_operator.api import crd, pool
from kvshare_operator.api.pool import SpecError, read_spec
from pods import pool_p1

ROOT = pathlib.Path(__file__).parents[2]
SCHEMA = crd.structural_schema()


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below ``node`` with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(node.get(keyword), dict):
            yield from nodes(node[keyword], f"{path}[]")


ALL = dict(nodes(SCHEMA))
SPEC = {path: node for path, node in ALL.items() if path.startswith(".spec")}


def test_only_keywords_of_structural_schemas_are_used() -> None:
    """No $ref, no null, no titles."""
    for path, node in ALL.items():
        assert set(node) <= crd.ALLOWED_KEYWORDS, path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path


def test_spec_has_no_bools_floats_or_free_maps() -> None:
    """API conventions: enums instead of bools, integers instead of floats."""
    for path, node in SPEC.items():
        assert node.get("type") not in ("boolean", "number"), path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_lists_strings_and_numbers_of_the_spec_are_bounded() -> None:
    """Bounds make CEL affordable and objects small."""
    for path, node in SPEC.items():
        if node.get("type") == "array":
            assert "maxItems" in node, path
            assert "x-kubernetes-list-type" in node, path
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if node.get("type") == "integer":
            assert {"minimum", "maximum", "format"} <= set(node), path


def test_every_field_of_the_spec_is_described() -> None:
    """`kubectl explain` is documentation."""
    for path, node in SPEC.items():
        if not path.endswith("[]"):
            assert node.get("description"), path


def test_every_cel_rule_has_a_message_and_stands_on_one_line() -> None:
    """Multi-line rules without message are refused by API servers."""
    found = [rule for node in ALL.values() for rule in node.get("x-kubernetes-validations", [])]
    assert len(found) >= 12
    for rule in found:
        assert rule["message"]
        assert "\n" not in rule["rule"]


def test_status_uses_conditions_and_no_phase() -> None:
    """Conditions are a map by type."""
    status = SCHEMA["properties"]["status"]["properties"]
    assert "phase" not in status
    assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_generated_files_are_what_their_source_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make generate` was run."""
    monkeypatch.chdir(ROOT)
    assert crd.main(["--check"]) == 0


def test_chart_template_is_the_same_object() -> None:
    """One source for both."""
    text = crd.chart_template()
    plain = "\n".join(line for line in text.splitlines() if "{{" not in line)
    plain = plain.replace("  labels:\n", "").replace("  annotations:\n    helm.sh/resource-policy: keep\n", "")
    assert yaml.safe_load(plain) == crd.definition()


def test_spec_that_breaks_several_rules_names_all_of_them() -> None:
    """Given and expected, with field paths."""
    raw = pool_p1(prefill={"tensorParallelSizes": "4,2"}, storeTPSize=True, onConflict="Maybe")["spec"]
    with pytest.raises(SpecError) as caught:
        read_spec(raw)
    fields = {field for field, _ in caught.value.mistakes}
    assert fields == {"spec.prefill.tensorParallelSizes", "spec.storeTPSize", "spec.onConflict"}


def test_unknown_keys_are_refused_in_peoples_files_and_ignored_in_stored_objects() -> None:
    """A typo is not silently dropped; a newer field does not stop an older operator."""
    raw = {**pool_p1()["spec"], "prefil": {}}
    assert read_spec(raw)
    with pytest.raises(SpecError, match="prefil"):
        read_spec(raw, unknown_keys="forbid")


def test_defaults_are_those_of_the_design() -> None:
    """Three facts are enough: model, sizes, store."""
    spec = read_spec(pool_p1()["spec"])
    assert spec.cache.block_size_tokens == 16
    assert spec.cache.hash_algorithm == "sha256_cbor"
    assert spec.pipeline_parallel_sizes == [1]
    assert (spec.connector.source, spec.on_conflict, spec.store.protocol) == ("InitContainer", "Skip", "TCP")
    assert pool.Decode(tensor_parallel_sizes=[1]).save_decode_cache == "Disabled"
