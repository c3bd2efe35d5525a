"""`kvshare inject`: the webhook's decisions on people's files, the documented JSON, and files that stay theirs."""

from __future__ import annotations

import copy
import io
import json
import pathlib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from typer.testing import CliRunner

from kvshare_operator.api import names
from kvshare_operator.cli.inject import DEFAULT_IMAGE
from kvshare_operator.cli.main import app
from kvshare_operator.cli.manifests import indentation, split
from kvshare_operator.core.injection.settings import InjectionSettings
from pods import Json, injected, pod_p0, pool_p1

FIELDS = {
    "source", "kind", "namespace", "name", "templatePath", "decision", "reason", "message", "remedy", "container",
    "role", "localTP", "patch",
}  # fmt: skip
SETTINGS = InjectionSettings(connector_image=DEFAULT_IMAGE)
TEMPLATE = {"metadata": {"annotations": {names.POOL: "p1"}}, "spec": pod_p0()["spec"]}
WORKER = {
    "metadata": {"annotations": {names.POOL: "p1"}},
    "spec": {"containers": [{"name": "w", "command": ["bash", "-c"], "args": ["ray start --address=$(L) --block"]}]},
}


@pytest.fixture
def pool_file(tmp_path: pathlib.Path) -> str:
    """Pool p1 in a file."""
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_p1()))
    return str(path)


def invoke(*words: str, stdin: str | None = None) -> Any:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["inject", *words], input=stdin)


def items(pool: str, text: str, code: int = 0, *words: str) -> list[Json]:
    """Run on standard input with JSON output and expect an exit code."""
    result = invoke("-f", "-", "--pool", pool, "-o", "json", *words, stdin=text)
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert set(found) == {"items"}
    assert all(set(item) == FIELDS for item in found["items"])
    return list(found["items"])


def printed(pool: str, text: str, code: int = 0, *words: str) -> str:
    """Run on standard input with YAML output and expect an exit code."""
    result = invoke("-f", "-", "--pool", pool, *words, stdin=text)
    assert result.exit_code == code, result.output
    return str(result.stdout)


def thing(kind: str, spec: Json, version: str = "apps/v1") -> Json:
    """An object in the pool's namespace."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "x", "namespace": "ns-a"}, "spec": spec}


KINDS = {
    "Pod": (pod_p0(), [""]),
    "Deployment": (thing("Deployment", {"template": TEMPLATE}), ["spec.template"]),
    "StatefulSet": (thing("StatefulSet", {"template": TEMPLATE}), ["spec.template"]),
    "DaemonSet": (thing("DaemonSet", {"template": TEMPLATE}), ["spec.template"]),
    "ReplicaSet": (thing("ReplicaSet", {"template": TEMPLATE}), ["spec.template"]),
    "Job": (thing("Job", {"template": TEMPLATE}, "batch/v1"), ["spec.template"]),
    "CronJob": (
        thing("CronJob", {"jobTemplate": {"spec": {"template": TEMPLATE}}}, "batch/v1"),
        ["spec.jobTemplate.spec.template"],
    ),
    "JobSet": (
        thing("JobSet", {"replicatedJobs": [{"template": {"spec": {"template": TEMPLATE}}}]}, "jobset.x-k8s.io/v1"),
        ["spec.replicatedJobs[0].template.spec.template"],
    ),
    "PodTemplate": (
        {**thing("PodTemplate", {}, "v1"), "template": TEMPLATE},
        ["template"],
    ),
    "LeaderWorkerSet": (
        thing(
            "LeaderWorkerSet",
            {"leaderWorkerTemplate": {"leaderTemplate": TEMPLATE, "workerTemplate": WORKER}},
            "leaderworkerset.x-k8s.io/v1",
        ),
        ["spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate"],
    ),
    "InferenceService": (
        thing(
            "InferenceService",
            {"predictor": {"annotations": {names.POOL: "p1"}, **pod_p0()["spec"]}},
            "serving.kserve.io/v1beta1",
        ),
        ["spec.predictor"],
    ),
    "ServingRuntime": (
        thing("ServingRuntime", {"annotations": {names.POOL: "p1"}, **pod_p0()["spec"]}, "serving.kserve.io/v1alpha1"),
        ["spec"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_a_pod_template_is_injected_as_the_webhook_would(pool_file: str, kind: str) -> None:
    """The pod inside is the webhook's pod, and nothing else of the object changes."""
    before, paths = KINDS[kind]
    found = items(pool_file, yaml.safe_dump(before))
    assert [(one["kind"], one["templatePath"], one["decision"]) for one in found] == [
        (kind, path, "injected") for path in paths
    ]
    after = yaml.safe_load(printed(pool_file, yaml.safe_dump(before)))
    wanted = injected(pod_p0(), settings=SETTINGS).pod["spec"]
    first = after
    for part in filter(None, paths[0].replace("[0]", ".0").split(".")):
        first = first[int(part)] if isinstance(first, list) else first[part]
    spec = first if "containers" in first else first["spec"]
    assert {key: spec[key] for key in wanted} == wanted


def test_workers_of_a_group_get_code_and_no_flags(pool_file: str) -> None:
    """The leader carries the flags; the label of the group is not written into the template."""
    before = KINDS["LeaderWorkerSet"][0]
    leader, worker = items(pool_file, yaml.safe_dump(before))
    assert (leader["role"], leader["localTP"], leader["container"]) == ("both", 2, "vllm")
    assert (worker["role"], worker["localTP"], worker["container"]) == ("worker", None, "w")
    after = yaml.safe_load(printed(pool_file, yaml.safe_dump(before)))["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert after["metadata"]["labels"] == {names.MEMBER: "p1"}
    assert after["spec"]["containers"][0]["args"] == WORKER["spec"]["containers"][0]["args"]  # type: ignore[index]


def test_lists_and_files_with_several_documents(pool_file: str) -> None:
    """Each object is an item; patches begin at the object; what has not opted in stays."""
    plain = copy.deepcopy(KINDS["Job"][0])
    del plain["spec"]["template"]["metadata"]
    listed = {"apiVersion": "v1", "kind": "List", "items": [KINDS["Deployment"][0], plain]}
    text = yaml.safe_dump_all([listed, {"kind": "Service", "apiVersion": "v1"}, pod_p0()])
    found = items(pool_file, text)
    assert [(one["kind"], one["decision"]) for one in found] == [
        ("Deployment", "injected"), ("Job", "notOptedIn"), ("Pod", "injected"),
    ]  # fmt: skip
    assert all(operation["path"].startswith("/spec/template/") for operation in found[0]["patch"])
    after = list(yaml.safe_load_all(printed(pool_file, text)))
    assert after[0]["items"][1] == plain
    assert names.INJECTED in after[0]["items"][0]["spec"]["template"]["metadata"]["annotations"]


def test_its_own_output_is_unchanged(pool_file: str) -> None:
    """The same idempotence as the webhook's, and not a byte moves."""
    once = printed(pool_file, yaml.safe_dump(KINDS["Deployment"][0]))
    (again,) = items(pool_file, once)
    assert (again["decision"], again["patch"]) == ("unchanged", [])
    assert printed(pool_file, once) == once


def test_refusals_come_with_reason_and_remedy_and_leave_the_document(pool_file: str) -> None:
    """Exit code 1; the other documents are injected."""
    text = yaml.safe_dump_all([pod_p0(args=["--tensor-parallel-size", "3"]), pod_p0()])
    first, second = items(pool_file, text, 1)
    assert (first["decision"], first["reason"], second["decision"]) == ("refused", "TPNotInPool", "injected")
    assert first["message"]
    assert first["remedy"]
    result = invoke("-f", "-", "--pool", pool_file, stdin=text)
    assert "TPNotInPool" in result.stderr
    assert next(yaml.safe_load_all(result.stdout)) == pod_p0(args=["--tensor-parallel-size", "3"])


@pytest.mark.parametrize("kind", ["Pod", "Deployment"])
def test_items_of_a_list_of_one_kind_have_that_kind(pool_file: str, kind: str) -> None:
    """`kubectl get --raw` writes a PodList whose items name neither kind nor version."""
    bare: Json = {key: value for key, value in pod_p0().items() if key in ("metadata", "spec")}
    if kind == "Deployment":
        bare = {"metadata": {"name": "d", "namespace": "ns-a"}, "spec": {"template": TEMPLATE}}
    text = yaml.safe_dump({"apiVersion": "v1", "kind": f"{kind}List", "items": [bare, bare]})
    found = items(pool_file, text)
    assert [(item["kind"], item["decision"]) for item in found] == [(kind, "injected")] * 2
    after = yaml.safe_load(printed(pool_file, text))
    assert all("kind" not in one for one in after["items"])
    assert "kvshare.dev/injected" in json.dumps(after["items"][1])


@pytest.mark.parametrize("text", ["kind: List\nitems:\n", "METADATA 7", "METADATA"])
def test_pool_file_of_another_shape_is_named(tmp_path: pathlib.Path, text: str) -> None:
    """What was given and what is expected, not a traceback; without metadata a pool is `default/`."""
    path = tmp_path / "pool.yaml"
    pool = {key: value for key, value in pool_p1().items() if key != "metadata"}
    path.write_text(text.replace("METADATA", yaml.safe_dump(pool) + "metadata:"))
    result = invoke("-f", "-", "--pool", str(path), stdin=yaml.safe_dump(pod_p0()))
    assert result.exit_code == (1 if text == "METADATA" else 2), result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metadata": {"name": "p0", "namespace": "ns-b", "annotations": {names.POOL: "p1"}}}, "PoolNotFound"),
        ({"metadata": {"name": "p0", "namespace": "ns-a", "annotations": {names.POOL: "p2"}}}, "PoolNotFound"),
        ({"spec": {"containers": [{"name": "a", "args": "--x"}, {"name": "b", "env": {"A": "b"}}]}}, "ManifestInvalid"),
    ],
)
def test_what_the_cluster_would_refuse_is_refused(pool_file: str, change: Json, reason: str) -> None:
    """A pool of another namespace, another pool, a manifest that is no pod; all mistakes at once."""
    (found,) = items(pool_file, yaml.safe_dump({**pod_p0(), **change}), 1)
    assert (found["decision"], found["reason"]) == ("refused", reason)
    if reason == "ManifestInvalid":
        assert "containers[0].args" in found["message"]
        assert "containers[1].env" in found["message"]


def test_numbers_that_yaml_makes_of_annotations_are_named(pool_file: str) -> None:
    """The API server refuses them, with less helpful words."""
    pod = pod_p0()
    pod["metadata"]["annotations"][names.TENSOR_PARALLEL_SIZE] = 2
    (found,) = items(pool_file, yaml.safe_dump(pod), 1)
    assert found["reason"] == "ManifestInvalid"
    assert "kvshare.dev/tensor-parallel-size" in found["message"]


def test_objects_without_namespace_are_in_the_pools(pool_file: str) -> None:
    """Unless -n says otherwise."""
    pod = pod_p0()
    del pod["metadata"]["namespace"]
    (found,) = items(pool_file, yaml.safe_dump(pod))
    assert found["namespace"] == "ns-a"
    (found,) = items(pool_file, yaml.safe_dump(pod), 1, "-n", "ns-b")
    assert found["reason"] == "PoolNotFound"


@pytest.mark.parametrize("where", ["annotations", "labels"])
def test_annotations_that_no_pod_gets_are_pointed_out(pool_file: str, where: str) -> None:
    """On the Deployment itself, or as a label: a common mistake."""
    wrong = copy.deepcopy(KINDS["Deployment"][0])
    wrong["metadata"][where] = wrong["spec"]["template"].pop("metadata")["annotations"]
    (found,) = items(pool_file, yaml.safe_dump(wrong), 1)
    assert (found["decision"], found["reason"]) == ("notOptedIn", "AnnotationMisplaced")
    assert f"metadata.{where}" in found["message"]
    assert "spec.template.metadata.annotations" in found["remedy"]
    assert "AnnotationMisplaced" in invoke("-f", "-", "--pool", pool_file, stdin=yaml.safe_dump(wrong)).stderr


def test_misspelled_annotations_are_named_whatever_is_decided(pool_file: str) -> None:
    """Beside an injection, in a refusal, and where the opt-in itself is misspelled."""
    pod = pod_p0()
    annotations = pod["metadata"]["annotations"]
    annotations["kvshare.dev/rol"], annotations["other.dev/rol"] = "prefill", "x"
    sentence = "annotation kvshare.dev/rol is not known and has no effect; kvshare.dev/role expected"
    (found,) = items(pool_file, yaml.safe_dump(pod))
    assert (found["decision"], found["role"]) == ("injected", "both")
    assert found["message"].endswith(f"; {sentence}")
    pod["spec"]["containers"][0]["args"] = ["--tensor-parallel-size=8"]
    (found,) = items(pool_file, yaml.safe_dump(pod), 1)
    assert found["reason"] == "TPNotInPool"
    assert found["message"].endswith(f"({sentence})")
    annotations["kvshare.dev/pol"] = annotations.pop(names.POOL)
    (found,) = items(pool_file, yaml.safe_dump(pod))
    assert found["decision"] == "notOptedIn"
    assert "annotation kvshare.dev/pol is not known and has no effect; kvshare.dev/pool expected" in found["message"]
    assert "kvshare.dev/pool expected" in invoke("-f", "-", "--pool", pool_file, stdin=yaml.safe_dump(pod)).stderr


@pytest.mark.parametrize("own", [False, True])
def test_secrets_of_the_service_account_that_are_kept_out_are_pointed_out(tmp_path: pathlib.Path, own: bool) -> None:
    """Kubernetes adds them to pods that name none; a template with ours names some."""
    pool = tmp_path / "pool.yaml"
    pool.write_text(yaml.safe_dump(pool_p1(connector={"imagePullSecrets": [{"name": "registry"}]})))
    pod = pod_p0()
    if own:
        pod["spec"]["imagePullSecrets"] = [{"name": "own"}]
    (found,) = items(str(pool), yaml.safe_dump(pod))
    assert found["decision"] == "injected"
    assert ("no longer adds those of the ServiceAccount" in found["message"]) is not own


def test_annotated_objects_without_any_template_are_pointed_out(pool_file: str) -> None:
    """A Service is no engine."""
    service = {"kind": "Service", "metadata": {"name": "s", "annotations": {names.POOL: "p1"}}}
    (found,) = items(pool_file, yaml.safe_dump(service))
    assert (found["templatePath"], found["reason"]) == (None, "AnnotationMisplaced")


STYLED = """# an engine
apiVersion: apps/v1
kind: Deployment
metadata:
    name: "decode"   # its name
    namespace: ns-a
spec:
    template:
        metadata:
            annotations: {kvshare.dev/pool: p1}  # opt in
        spec:
            containers:
              # the engine
              - name: vllm
                command: ['vllm', serve, "org/m"]
                args:
                  - --tensor-parallel-size=2  # two

                # where it listens
                ports:
                  - containerPort: 8000

            # how it ends
            terminationGracePeriodSeconds: 60
    paused: 2026-01-01
---
# only a remark
---
apiVersion: v1
kind:   Service
metadata: { name:   s }
"""


def test_comments_order_quotes_and_indentation_stay(pool_file: str) -> None:
    """Every line of the user is there, in its order; documents without change keep their text."""
    after = printed(pool_file, STYLED)
    kept = iter(after.splitlines())
    flow = "            annotations: {kvshare.dev/pool: p1"
    for line in STYLED.splitlines():
        assert any(line == one or (line.startswith(flow) and one.startswith(flow)) for one in kept), line
    lines = after.splitlines()
    for comment, follower in (("# where it listens", "ports:"), ("# how it ends", "terminationGracePeriodSeconds: 60")):
        number = next(n for n, line in enumerate(lines) if line.strip() == comment)
        assert lines[number + 1].strip() == follower
    assert after.endswith(STYLED[STYLED.index("---\n# only") :])


def test_diff_shows_additions_only(pool_file: str) -> None:
    """Nothing of the user's is taken away; unchanged documents do not appear; plain when piped."""
    result = invoke("-f", "-", "--pool", pool_file, "-o", "diff", stdin=yaml.safe_dump_all([KINDS["Job"][0], {"a": 1}]))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1] == "+++ - (Job/x)"
    assert not [line for line in lines[2:] if line.startswith("-")]
    assert any("--kv-transfer-config.kv_connector=KVShareConnector" in line for line in lines)
    assert "\x1b[" not in result.stdout


def test_anchors_never_change_what_they_also_stand_for(pool_file: str) -> None:
    """One container shared by two templates: only the one that opted in is injected."""
    text = (
        "kind: List\napiVersion: v1\nitems:\n"
        "- {apiVersion: v1, kind: Pod, metadata: {name: a, namespace: ns-a}, spec: &s {containers: [{name: vllm, "
        "command: [vllm, serve, org/m], args: [-tp, '2']}]}}\n"
        "- apiVersion: v1\n  kind: Pod\n  metadata: {name: b, namespace: ns-a, annotations: {kvshare.dev/pool: p1}}\n"
        "  spec: *s\n"
    )
    result = invoke("-f", "-", "--pool", pool_file, stdin=text)
    assert result.exit_code == 0
    first, second = yaml.safe_load(result.stdout)["items"]
    assert first["spec"]["containers"][0]["args"] == ["-tp", "2"]
    assert len(second["spec"]["containers"][0]["args"]) > 2
    assert "anchors" in result.stderr


def test_several_files_are_joined_and_all_mistakes_are_named_at_once(pool_file: str, tmp_path: pathlib.Path) -> None:
    """-f twice; a missing file, text that is no YAML and an unrendered template."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(yaml.safe_dump(pod_p0()))
    result = invoke("-f", str(tmp_path / "a"), "-f", str(tmp_path / "b"), "--pool", pool_file)
    assert len(list(yaml.safe_load_all(result.stdout))) == 2
    (tmp_path / "b").write_text("a: b\n---\nkind: {{ .Values.kind }}\n  x: ]\n")
    result = invoke("-f", str(tmp_path / "none"), "-f", str(tmp_path / "b"), "--pool", str(tmp_path / "gone"))
    assert result.exit_code == 2
    words = " ".join(result.stderr.replace("│", " ").split())
    assert "No such file" in words
    assert "render templates first" in words


@pytest.mark.parametrize(
    "words",
    [
        ("--kubernetes-version", "new"),
        ("--known-image", "("),
        ("--report-url", "https://x"),
        ("--report-ca", "/nowhere"),
        ("-o", "table"),
    ],
)
def test_wrong_usage_exits_with_2(pool_file: str, words: tuple[str, ...]) -> None:
    """The words say what was expected."""
    assert invoke("-f", "-", "--pool", pool_file, *words, stdin="").exit_code == 2
    assert invoke("-f", "-").exit_code == 2
    assert invoke("-f", "-", "--pool", "-", stdin="").exit_code == 2


def test_a_pool_that_breaks_its_schema_refuses_every_template(tmp_path: pathlib.Path) -> None:
    """With every mistake in the message."""
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_p1(onConflict="Maybe", extra=1)))
    (found,) = items(str(path), yaml.safe_dump(pod_p0()), 1)
    assert found["reason"] == "SpecInvalid"
    assert "onConflict" in found["message"]
    assert "extra" in found["message"]


def test_installation_settings_reach_the_pods(pool_file: str, tmp_path: pathlib.Path) -> None:
    """Report endpoint, image, and image volumes on a new enough cluster."""
    (tmp_path / "ca").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    words = ("--report-url", "https://r.s.svc:9444/v1/report", "--report-ca", str(tmp_path / "ca"))
    after = yaml.safe_load(printed(pool_file, yaml.safe_dump(pod_p0()), 0, *words, "--connector-image", "x/y:1"))
    assert after["metadata"]["annotations"][names.REPORT_CA] == (tmp_path / "ca").read_text()
    assert after["spec"]["initContainers"][0]["image"] == "x/y:1"
    volume = tmp_path / "volume.yaml"
    volume.write_text(yaml.safe_dump(pool_p1(connector={"source": "ImageVolume"})))
    items(str(volume), yaml.safe_dump(pod_p0()), 1)
    items(str(volume), yaml.safe_dump(pod_p0()), 0, "--kubernetes-version", "v1.36.2")


@given(
    st.lists(
        st.sampled_from(
            ["---\n", "--- # x\n", "...\n", "... # y\n", "a: 1\n", "# c\n", "\n", "b: |\n  ---\n", "%YAML 1.2\n"]
        )
    )
)
def test_splitting_loses_nothing(parts: list[str]) -> None:
    """Parts joined are the file."""
    text = "".join(parts)
    assert "".join(split(text)) == text


@given(st.sampled_from([2, 3, 4, 8]), st.sampled_from([0, 2]))
def test_indentation_is_seen(mapping: int, dash: int) -> None:
    """Whatever the file uses."""
    out = YAML()
    out.indent(mapping=mapping, sequence=dash + 2, offset=dash)
    buffer = io.StringIO()
    out.dump(KINDS["Deployment"][0], buffer)
    assert indentation(buffer.getvalue()) == (mapping, dash)


def test_default_image_is_the_charts() -> None:
    """Repository and version of values.yaml and Chart.yaml."""
    chart = pathlib.Path(__file__).parents[2] / "charts" / "kvshare"
    image = yaml.safe_load((chart / "values.yaml").read_text())["connector"]["image"]
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    assert f"{image['repository']}:{version}" == DEFAULT_IMAGE


POD = "kind: Pod\napiVersion: v1\nmetadata: {name: %s, namespace: ns-a, annotations: {kvshare.dev/pool: p1}}\n" + (
    "spec: {containers: [{name: vllm, command: [vllm, serve, org/m], args: [-tp, '2']}]}\n"
)


@pytest.mark.parametrize(
    "text",
    [
        POD % "a" + "...\n" + POD % "b",
        POD % "a" + "...\n---\n" + POD % "b" + "...\n",
        "%YAML 1.2\n---\n" + POD % "a" + "---\n" + POD % "b",
        "# first\n---\n" + POD % "a" + "---\n---\n" + POD % "b" + "--- # end\n",
        "\ufeff" + POD % "a" + "---\n" + POD % "b",
        (POD % "a" + "---\n" + POD % "b").replace("\n", "\r\n"),
        json.dumps({"kind": "List", "items": [yaml.safe_load(POD % "a"), yaml.safe_load(POD % "b")]}, indent=2),
    ],
    ids=["ends", "ends and marks", "directive", "empty documents", "byte-order mark", "windows", "json"],
)
def test_every_form_of_document_boundary_is_understood(pool_file: str, tmp_path: pathlib.Path, text: str) -> None:
    """Both pods are injected, the output is YAML again, and running on it changes nothing."""
    path = tmp_path / "pods.yaml"
    path.write_bytes(text.encode())
    result = invoke("-f", str(path), "--pool", pool_file)
    assert result.exit_code == 0, result.stderr
    found = items(pool_file, result.stdout)
    assert [(one["name"], one["decision"]) for one in found] == [("a", "unchanged"), ("b", "unchanged")]


def test_json_manifests_stay_json(pool_file: str) -> None:
    """What is one JSON document comes out as one."""
    after = json.loads(printed(pool_file, json.dumps(KINDS["Job"][0])))
    assert names.INJECTED in after["spec"]["template"]["metadata"]["annotations"]


def test_kserve_annotations_at_the_object_count(pool_file: str) -> None:
    """KServe hands the object's annotations to its pods; ours join them there."""
    service = thing("InferenceService", {"predictor": pod_p0()["spec"]}, "serving.kserve.io/v1beta1")
    service["metadata"]["annotations"] = {names.POOL: "p1"}
    (found,) = items(pool_file, yaml.safe_dump(service))
    assert (found["decision"], found["templatePath"]) == ("injected", "spec.predictor")
    after = yaml.safe_load(printed(pool_file, yaml.safe_dump(service)))
    assert names.INJECTED in after["metadata"]["annotations"]
    assert "annotations" not in after["spec"]["predictor"]


def test_annotations_of_an_llm_inference_service_count_where_kserve_hands_them_on(pool_file: str) -> None:
    """`spec.annotations` and `spec.prefill.annotations`; those of the object itself reach no pod."""
    spec = {"prefill": {"template": pod_p0()["spec"]}, "template": pod_p0()["spec"], "worker": pod_p0()["spec"]}
    service = thing("LLMInferenceService", spec, "serving.kserve.io/v1alpha2")
    service["metadata"]["annotations"] = {names.POOL: "p1"}
    found = items(pool_file, yaml.safe_dump(service), 1)
    assert {(one["decision"], one["reason"]) for one in found} == {("notOptedIn", "AnnotationMisplaced")}
    assert "to spec.prefill.annotations or spec.annotations." in found[0]["remedy"]
    service["spec"]["annotations"] = service["metadata"].pop("annotations")
    found = items(pool_file, yaml.safe_dump(service))
    assert [one["decision"] for one in found] == ["notOptedIn", "injected", "injected"]
    after = yaml.safe_load(printed(pool_file, yaml.safe_dump(service)))
    assert names.INJECTED in after["spec"]["annotations"]


def test_resource_that_makes_pods_unseen_is_not_said_to_do_nothing(pool_file: str) -> None:
    """Dynamo hands `extraPodMetadata` to its pods, and nothing in the file looks like one."""
    worker = {"extraPodMetadata": {"annotations": {names.POOL: "p1"}}, "extraPodSpec": {"mainContainer": {}}}
    graph = thing("DynamoGraphDeployment", {"services": {"Worker": worker}}, "nvidia.com/v1alpha1")
    (found,) = items(pool_file, yaml.safe_dump(graph))
    assert (found["decision"], found["reason"], found["templatePath"]) == ("notOptedIn", "", None)
    assert "look at the pods" in found["message"]
    assert "look at the pods" in invoke("-f", "-", "--pool", pool_file, stdin=yaml.safe_dump(graph)).stderr


def test_several_pools_serve_their_own_namespaces(pool_file: str, tmp_path: pathlib.Path) -> None:
    """--pool twice; each pod gets the one of its namespace and name."""
    other = pool_p1(storeTPSize=8)
    other["metadata"].update(name="p2", namespace="ns-b")
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    pod = pod_p0()
    pod["metadata"].update(namespace="ns-b", annotations={names.POOL: "p2"})
    text = yaml.safe_dump_all([pod_p0(), pod])
    found = items(pool_file, text, 0, "--pool", str(tmp_path / "other.yaml"))
    assert [one["decision"] for one in found] == ["injected", "injected"]
