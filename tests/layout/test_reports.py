"""Reports: read back as written, and never trusted."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_layout.errors import LayoutError
from kvshare_layout.reports import MAX_BYTES, MAX_ENGINE_INDEX, VERDICTS, MemberReport, from_json, to_json, worst

GOOD = MemberReport(
    pool_prefix="kvs1/p-0123456789ab/g1",
    verdict="shared",
    reason="Shared",
    message="shares 4 Store shards in 1 Store stages",
    fingerprint="0" * 32,
    namespace="kvs1/p-0123456789ab/g1/f-" + "0" * 32,
    store_tp=4,
    tp=2,
    pp=1,
    rank_layouts=("LBHNC",),
    kv_heads=8,
    block_tokens=16,
    manifest={"weights": "abc"},
    engine="0.32.0",
)


def _printable(limit: int) -> st.SearchStrategy[str]:
    return st.text(st.just(" ") | st.characters(exclude_categories=["C", "Z"]), max_size=limit)


counts = st.integers(0, 1 << 20)
reports = st.builds(
    MemberReport,
    pool_prefix=_printable(20),
    verdict=st.sampled_from(VERDICTS),
    reason=st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,30}", fullmatch=True),
    message=_printable(60),
    fingerprint=_printable(20),
    namespace=_printable(20),
    store_tp=counts,
    tp=counts,
    pp=counts,
    rank_layouts=st.lists(_printable(8), max_size=8).map(tuple),
    kv_heads=st.none() | st.integers(1, 1 << 20),
    block_tokens=counts,
    manifest=st.dictionaries(_printable(10), _printable(20), max_size=5),
    engine=_printable(20),
    engine_index=st.integers(0, MAX_ENGINE_INDEX),
)


@given(reports)
def test_a_report_is_read_back_as_it_was_written(report: MemberReport) -> None:
    """Every field."""
    assert from_json(to_json(report)) == report


@given(
    st.text(max_size=3000),
    st.dictionaries(st.text(max_size=300), st.text(max_size=6000), max_size=4),
    st.lists(st.text(max_size=30), max_size=12).map(tuple),
)
def test_any_text_leaves_as_a_report_that_is_accepted(
    text: str, manifest: dict[str, str], layouts: tuple[str, ...]
) -> None:
    """A message that is too long reaches people shortened rather than not at all."""
    report = replace(GOOD, message=text, engine=text, manifest=manifest, rank_layouts=layouts)
    read = from_json(to_json(report))
    assert read.verdict == "shared"
    assert len(read.message) <= 1024
    if text.isprintable() and len(text) <= 1024:
        assert read.message == text


def test_a_huge_manifest_is_cut_to_a_body_that_is_accepted() -> None:
    """The verdict matters more than the diagnosis."""
    manifest = {f"{i:04d}" + "\U0001f600" * 100: "\U0001f600" * 4000 for i in range(300)}
    body = to_json(replace(GOOD, manifest=manifest))
    assert len(body) <= MAX_BYTES
    assert from_json(body).fingerprint == GOOD.fingerprint


WRONG: dict[str, list[object]] = {
    "pool_prefix": [None, 1, "x" * 129, "a\nb"],
    "verdict": ["good", None, [], {}],
    "reason": ["", "Two words", "x" * 65, 3, "1a", "Shared\n"],
    "message": [None, "x" * 1025, "\x1b[31mred", "\ud800"],
    "fingerprint": ["x" * 65, 0],
    "namespace": ["x" * 257, []],
    "store_tp": [-1, True, 1.0, "4", 1 << 21, None],
    "tp": [-1, False, 10**400],
    "pp": ["1"],
    "rank_layouts": ["LBHNC", ["x" * 17], [1], ["a"] * 9, None, ["a\nb"]],
    "kv_heads": [0, -1, True, 2.0, "8"],
    "block_tokens": [None],
    "manifest": [[], None, {"a": 1}, {"a": "x" * 4097}, {"x" * 129: ""}, {"a": "\n"}, {"\t": "a"}],
    "engine": [None, "x" * 65],
    "engine_index": [-1, 64, True, 1.0, "1", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_every_wrong_field_is_named(name: str, value: object) -> None:
    """And nothing of the report is used."""
    data = json.loads(to_json(GOOD))
    data[name] = value
    with pytest.raises(LayoutError) as error:
        from_json(json.dumps(data).encode())
    assert all(mistake.startswith(f"{name}: ") for mistake in error.value.mistakes) or value == 10**400


def test_every_field_is_checked() -> None:
    """A new field needs wrong examples."""
    assert WRONG.keys() == {field.name for field in fields(MemberReport)}


def test_a_report_without_an_engine_number_is_read() -> None:
    """Members of the first release had one engine; an older operator ignores the number."""
    data = json.loads(to_json(GOOD))
    del data["engine_index"]
    assert from_json(json.dumps(data).encode()) == GOOD


def test_the_worst_verdict_speaks_for_a_pod() -> None:
    """Of several the first engine's, whatever the order."""
    shared, other = replace(GOOD, engine_index=3), replace(GOOD, engine_index=1)
    isolated, disabled = replace(GOOD, verdict="isolated"), replace(GOOD, verdict="disabled", engine_index=2)
    assert worst([]) is None
    assert worst([shared, other]) == worst([other, shared]) == other
    assert worst([isolated, shared]) == isolated
    assert worst([isolated, disabled, shared]) == disabled


def test_all_mistakes_are_named_at_once() -> None:
    """Two wrong fields, two sentences."""
    data = {**json.loads(to_json(GOOD)), "tp": -1, "verdict": "x"}
    with pytest.raises(LayoutError) as error:
        from_json(json.dumps(data).encode())
    assert len(error.value.mistakes) == 2


@pytest.mark.parametrize("version", [None, 0, 2, "1", True, 1.5])
def test_another_version_is_refused_with_the_remedy(version: object) -> None:
    """Operator and connector of different releases."""
    data = {**json.loads(to_json(GOOD)), "version": version}
    with pytest.raises(LayoutError, match="same release"):
        from_json(json.dumps(data).encode())


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b"null", b"{", b"\xff", b'"x"', b"[" * 60000, b'{"version":' + b"9" * 5000 + b"}"]
)
def test_bodies_that_are_no_report_are_refused(body: bytes) -> None:
    """Deeply nested ones and huge numbers too."""
    with pytest.raises(LayoutError):
        from_json(body)


def test_large_bodies_are_refused_unread() -> None:
    """A pod cannot fill the operator's memory."""
    with pytest.raises(LayoutError, match="at most 65536 expected"):
        from_json(b" " * (MAX_BYTES + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([field.name for field in fields(MemberReport)]), json_values))
def test_any_json_is_read_or_refused(changes: dict[str, object]) -> None:
    """Whatever is accepted can be written again."""
    data = {**json.loads(to_json(GOOD)), **changes}
    try:
        report = from_json(json.dumps(data).encode())
    except LayoutError:
        return
    assert from_json(to_json(report)) == report


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(body: bytes) -> None:
    """Never another exception."""
    with pytest.raises(LayoutError):
        from_json(body)
