"""`kvshare inject` on files as they are found in the wild: anchors, CRLF, tabs, double keys, emoji, huge ones.

Whatever comes in, the answer is one of three: the same file with additions, the same file, or words that say what is
wrong and where. Never a traceback, never something else than what a YAML parser reads from the file.
"""

from __future__ import annotations

import json
import pathlib
import re
import tempfile
import time
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvshare_operator.api import names
from kvshare_operator.cli.main import app
from pods import pod_p0, pool_p1

POD = """apiVersion: v1
kind: Pod
metadata:
  name: p0
  namespace: ns-a
  annotations:
    kvshare.dev/pool: p1
spec:
  containers:
  - name: vllm
    image: example.org/vllm:1
    command: [vllm, serve, org/m]
    args: [--tensor-parallel-size, "2"]
"""


@pytest.fixture
def pool_file(tmp_path: pathlib.Path) -> str:
    """Pool p1 in a file."""
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_p1()))
    return str(path)


def run(pool: str, file: pathlib.Path, *words: str) -> Any:
    """Run the command on a file; a traceback fails the test."""
    result = CliRunner().invoke(app, ["inject", "-f", str(file), "--pool", pool, *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write(folder: pathlib.Path, text: str | bytes) -> pathlib.Path:
    """A file with exactly these bytes."""
    path = folder / "pods.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def parsed(text: str) -> list[Any]:
    """What an ordinary parser reads."""
    return [one for one in yaml.safe_load_all(text) if one is not None]


GOOD: dict[str, str | bytes] = {
    "carriage returns": POD.replace("\n", "\r\n"),
    "a byte order mark": b"\xef\xbb\xbf" + POD.encode(),
    "no newline at the end": POD.rstrip("\n"),
    "other scripts and emoji": POD.replace("name: p0", 'name: p0\n  labels: {team: "模型 🦙 Ωmega"}'),
    "emoji in a comment": POD.replace("spec:", "spec: # 🦙 größer"),
    "an anchor and its alias": POD.replace("- name: vllm", "- name: &n vllm\n    workingDir: *n"),
    "a merge key": POD.replace("    image:", "    <<: {imagePullPolicy: Never}\n    image:"),
    "a folded scalar": POD.replace("spec:", "  # note\nspec:").replace(
        "    args:", "    env:\n    - name: T\n      value: >-\n        a b\n        c\n    args:"
    ),
    "a literal script in another container": POD
    + "  - name: side\n    command: [sh, -c]\n    args:\n    - |\n      set -e\n      # stays\n      sleep 1 \n",
    "a key in quotes": POD.replace("kind: Pod", '"kind": "Pod"'),
    "flow style": str(yaml.safe_dump(pod_p0(), default_flow_style=True)),
    "words that older parsers take for booleans": POD.replace("[--t", "[--served-model-name, 'no', 'on', '1e3', --t"),
    "a date and an octal": POD.replace("  name: p0", "  name: p0\n  labels: {day: '2026-01-01', mode: '0755'}"),
    "trailing blanks": POD.replace("spec:\n", "spec:   \n"),
    "documents without anything": "---\n---\n# nothing\n---\n" + POD + "---\n",
    "a directive": "%YAML 1.2\n---\n" + POD,
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_odd_but_valid_file_is_injected_and_means_what_it_meant(
    pool_file: str, tmp_path: pathlib.Path, text: str | bytes
) -> None:
    """An ordinary parser reads the same pod with our additions; the second run changes not a byte."""
    file = write(tmp_path, text)
    result = run(pool_file, file)
    assert result.exit_code == 0, result.output
    before = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    (old,), (new,) = parsed(before), parsed(result.stdout)
    assert names.INJECTED in new["metadata"]["annotations"]
    assert (
        new["spec"]["containers"][0]["args"][: len(old["spec"]["containers"][0]["args"])]
        == (old["spec"]["containers"][0]["args"])
    )
    for container, after in zip(old["spec"]["containers"], new["spec"]["containers"], strict=True):
        assert {k: v for k, v in after.items() if k in container and k not in ("args", "env")} == {
            k: v for k, v in container.items() if k not in ("args", "env")
        }
    assert old["metadata"].get("labels", {}).items() <= new["metadata"]["labels"].items()
    again = run(pool_file, write(tmp_path, result.stdout))
    assert again.stdout == result.stdout


SCALARS = """      env:
      - {name: A, value: "yes"}
      - {name: B, value: &off "off"}
      - {name: C, value: *off}
      - {name: D, value: '012'}
      - name: E
        value: &script |
          set -e
      - {name: F, value: *script}
      - {name: G, value: 2026-01-01}
    volumes:
    - {name: c, configMap: {name: c, defaultMode: 0400, optional: yes}}
    - {name: d, configMap: {name: d, defaultMode: &mode 0o444}}
    - {name: e, configMap: {name: e, defaultMode: *mode}}
"""


def test_values_that_anchors_share_are_still_what_kubernetes_reads(pool_file: str, tmp_path: pathlib.Path) -> None:
    """Written out, `"yes"` stays text and `0400` the same number of an older parser."""
    spec = "".join(f"  {line}\n" for line in POD.partition("spec:\n")[2].splitlines()) + SCALARS
    text = f"kind: List\nitems:\n- {{kind: Pod, metadata: {{name: a, namespace: ns-a}}, spec: &s\n{spec}  }}\n"
    text = f"kind: List\nitems:\n- kind: Pod\n  metadata: {{name: a, namespace: ns-a}}\n  spec: &s\n{spec}"
    text += "- kind: Pod\n  metadata: {name: b, namespace: ns-a, annotations: {kvshare.dev/pool: p1}}\n  spec: *s\n"
    result = run(pool_file, write(tmp_path, text))
    assert "written out, without comments" in result.stderr
    (before,), (after,) = parsed(text), parsed(result.stdout)
    assert after["items"][0] == before["items"][0]
    old, new = before["items"][1]["spec"], after["items"][1]["spec"]
    assert new["volumes"][:3] == old["volumes"]
    assert new["containers"][0]["env"][:7] == old["containers"][0]["env"]
    assert "&" not in result.stdout


@pytest.mark.parametrize("name", ["on", "y", "no", "off", "1e3", "0x1f", "012", "null", "true"])
def test_pool_with_the_name_of_another_value_stays_text(tmp_path: pathlib.Path, name: str) -> None:
    """The label that we add is text for every parser; `on` is a boolean for the one of kubectl."""
    pool = pool_p1()
    pool["metadata"]["name"] = name
    (tmp_path / "pool.yaml").write_text(json.dumps(pool))
    result = run(str(tmp_path / "pool.yaml"), write(tmp_path, POD.replace("pool: p1", f'pool: "{name}"')))
    assert result.exit_code == 0, result.output
    assert re.search(rf"{names.MEMBER}: [\"']{name}[\"']\n", result.stdout)


def test_line_endings_of_a_file_stay(pool_file: str, tmp_path: pathlib.Path) -> None:
    """A file from Windows stays one: no line of it ends in another way than before."""
    result = run(pool_file, write(tmp_path, POD.replace("\n", "\r\n")))
    assert result.stdout_bytes.count(b"\r\n") == result.stdout_bytes.count(b"\n")


BAD: dict[str, tuple[str | bytes, str]] = {
    "a tab as indentation": (POD.replace("  containers:", "\tcontainers:"), "line 9"),
    "a key twice": (POD.replace("kind: Pod\n", "kind: Pod\nkind: Deployment\n"), "line 3"),
    "an alias without an anchor": (POD.replace("name: vllm", "name: *gone"), "line 10"),
    "an open bracket": (POD.replace('"2"]', '"2"'), "is not YAML"),
    "a Helm template": (POD.replace("name: p0", "name: {{ .Release.Name }}-p0"), "render templates first"),
    "a binary file": (bytes(range(256)), "UTF-8"),
    "a null character": (POD.replace("p0", "p\0"), "is not YAML"),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD.keys())
def test_broken_file_is_named_with_the_place(
    pool_file: str, tmp_path: pathlib.Path, text: str | bytes, words: str
) -> None:
    """Exit code 2 or 1 and a sentence; nothing is printed that could be applied."""
    result = run(pool_file, write(tmp_path, text))
    assert result.exit_code in (1, 2), result.output
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_tag_that_would_make_an_object_stays_text(pool_file: str, tmp_path: pathlib.Path) -> None:
    """Nothing of a file is ever run; what the API server thinks of such a tag is its business."""
    result = run(pool_file, write(tmp_path, POD.replace("name: p0", "name: !!python/object:os.system x")))
    assert (result.exit_code, "!!python/object:os.system x" in result.stdout) == (0, True)


def test_aliases_that_grow_without_end_are_refused_in_time(pool_file: str, tmp_path: pathlib.Path) -> None:
    """Nine lines that would be a thousand million words."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 10)]
    began = time.thread_time()
    result = run(pool_file, write(tmp_path, "\n".join(lines) + "\n---\n" + POD))
    assert time.thread_time() - began < 10
    assert result.exit_code == 2
    assert "aliases" in result.stderr


def test_file_of_hundreds_of_objects_is_worked_off_in_seconds(pool_file: str, tmp_path: pathlib.Path) -> None:
    """What `helm template` of a large platform gives; only the pods change."""
    config = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  key: |\n" + "    line\n" * 50
    text = "---\n".join([config] * 400 + [POD] * 10)
    began = time.thread_time()
    result = run(pool_file, write(tmp_path, text))
    assert result.exit_code == 0
    assert result.stdout.count("    line\n") == text.count("    line\n")
    assert len(parsed(result.stdout)) == 410
    assert time.thread_time() - began < 20


@given(st.binary(max_size=200) | st.text("ab:-{}[]&*#|>'\"%\n\t ,?!@`0~", max_size=80))
def test_no_file_makes_a_traceback(text: str | bytes) -> None:
    """Any bytes: they are printed as they are, or refused in words."""
    with tempfile.TemporaryDirectory() as folder:
        pool = pathlib.Path(folder) / "pool.yaml"
        pool.write_text(yaml.safe_dump(pool_p1()))
        result = run(str(pool), write(pathlib.Path(folder), text))
        assert result.exit_code in (0, 1, 2)
