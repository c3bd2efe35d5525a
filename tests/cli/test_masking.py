"""Masking: nothing that looks like a secret leaves, and nothing that explains a problem is lost."""

from __future__ import annotations

import json
import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvshare_operator.cli.masking import MASKED, masked, masked_text
from pods import Json, injected, pod_p0, pool_p1

SECRET = "Q7x9-Zq.4wVb_81Lm"
WORD = st.text(string.ascii_letters + string.digits, min_size=12, max_size=30)

PLACES = {
    "a variable": pod_p0(env=[{"name": "HF_TOKEN", "value": SECRET}]),
    "a key of a cloud": pod_p0(env=[{"name": "AWS_SECRET_ACCESS_KEY", "value": SECRET}]),
    "an argument of its own": pod_p0(args=["--api-key", SECRET]),
    "a second key": pod_p0(args=["--api-key", "first", SECRET, "--port", "1"]),
    "a second key, with underscores": pod_p0(args=["--api_key", "first", SECRET]),
    "a second key in a script": pod_p0(args=[f"vllm serve m --api-key first {SECRET} --port 1"]),
    "keys in a log line": {"log": f"args: {{'api_key': ['first', '{SECRET}'], 'port': 1}}"},
    "an argument with =": pod_p0(args=[f"--api-key={SECRET}"]),
    "a quoted argument in a script": pod_p0(args=[f"vllm serve m --api-key '{SECRET}' --tensor-parallel-size 2"]),
    "an assignment in a script": pod_p0(args=[f"export HUGGING_FACE_HUB_TOKEN={SECRET}; vllm serve m"]),
    "JSON in an argument": pod_p0(args=["--kv-transfer-config", json.dumps({"secret_key": SECRET})]),
    "an address": pod_p0(env=[{"name": "HTTPS_PROXY", "value": f"http://user:{SECRET}@proxy.test:3128"}]),
    "a header": pod_p0(args=[f"curl -H 'Authorization: Bearer {SECRET}' http://x.test"]),
    "a field": {"kind": "Thing", "spec": {"password": SECRET}},
    "a Secret": {"kind": "Secret", "data": {"x": SECRET}, "stringData": {"y": SECRET}},
}


@pytest.mark.parametrize("thing", PLACES.values(), ids=PLACES.keys())
def test_secrets_are_masked_wherever_people_write_them(thing: Json) -> None:
    """The value is gone, and that something was there is to be seen."""
    shown = yaml.safe_dump(masked(thing))
    assert SECRET not in shown
    assert MASKED in shown


@pytest.mark.parametrize(
    "text",
    [
        "token hf_abcdefghijklmnopqrstuv was used",
        "got eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJl back",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "key AKIAABCDEFGHIJKLMNOP here",
    ],
)
def test_tokens_of_a_known_form_are_masked_in_any_text(text: str) -> None:
    """Also in the middle of a log line."""
    assert MASKED in masked_text(text)
    assert not {"hf_abcdefghijklmnopqrstuv", "eyJhbGciOiJSUzI1NiJ9", "MIIE", "AKIAABCDEFGHIJKLMNOP"} & set(
        masked_text(text).split()
    )
    assert "MIIE" not in masked_text(text)


def test_what_explains_a_problem_stays() -> None:
    """An injected pod without secrets, and its pool, come out as they were."""
    by_reference = {"name": "TOKEN_FROM", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    words = ["org/m", "--tensor-parallel-size", "2", "--max-num-batched-tokens", "8192", "--tokenizer", "org/m"]
    pod = injected(pod_p0(args=words, env=[{"name": "PYTHONHASHSEED", "value": "0"}, by_reference])).pod
    assert masked(pod) == pod
    assert masked(pool_p1()) == pool_p1()
    assert masked(["--api-key", "a", "b", "-tp", "2"]) == ["--api-key", MASKED, MASKED, "-tp", "2"]


def test_what_only_fills_pages_is_left_out() -> None:
    """Managed fields, and the copy that kubectl keeps: it repeats everything, unmasked."""
    thing = {
        "metadata": {
            "name": "x", "managedFields": [{"manager": "y"}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": SECRET, "kept": "1"},
        }
    }  # fmt: skip
    assert masked(thing) == {"metadata": {"name": "x", "annotations": {"kept": "1"}}}


@given(
    value=WORD,
    flag=st.sampled_from(["--api-key", "--hf-token", "--ssl-keyfile-password", "--vllm-api-key"]),
    glued=st.booleans(),
)
def test_values_of_secret_flags_never_pass(value: str, flag: str, glued: bool) -> None:
    """As a word of its own or behind `=`, and inside a script."""
    words = [f"{flag}={value}"] if glued else [flag, value]
    pod = pod_p0(args=["--port", "1", *words, "--block-size", "16"])
    after = masked(pod)["spec"]["containers"][0]["args"]
    assert value not in " ".join(after)
    assert after[:2] == ["--port", "1"]
    assert after[-2:] == ["--block-size", "16"]
    assert value not in masked_text("vllm serve m " + " ".join(words) + " --block-size 16")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_masking_takes_anything_and_can_be_repeated(thing: object) -> None:
    """It never fails, never changes what it was given, and masks what is masked no further."""
    before = repr(thing)
    once = masked(thing)
    assert repr(thing) == before
    assert masked(once) == once
