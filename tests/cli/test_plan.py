"""`kvshare plan`: exactly the documented JSON, exit codes, and words that help."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvshare_operator.cli.main import app
from pods import Json, pool_p1

FIELDS = {"storeTPSize", "source", "cacheNamespace", "cacheSplit", "ranks", "stages", "kinds", "problems"}
RANK = {"tp", "rank", "kvHeads", "shards", "replica", "replicas"}


def invoke(*words: str, stdin: str | None = None) -> Any:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["plan", *words], input=stdin)


def plan(*words: str, code: int = 0, stdin: str | None = None) -> Json:
    """Run with JSON output and expect an exit code."""
    result = invoke(*words, "-o", "json", stdin=stdin)
    assert result.exit_code == code, result.output
    found: Json = json.loads(result.stdout)
    assert set(found) == FIELDS
    return found


@pytest.fixture
def pool_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """Pool p1 in a file."""
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_p1()))
    return path


def test_flags_give_store_tp_and_one_row_for_each_distinct_tp_and_rank() -> None:
    """The three-line answer that people want first."""
    found = plan("--kv-heads", "8", "--prefill", "4,2", "--decode", "2")
    assert (found["storeTPSize"], found["source"], found["cacheNamespace"]) == (4, "lcm", None)
    assert [(row["tp"], row["rank"]) for row in found["ranks"]] == [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)]
    assert all(set(row) == RANK for row in found["ranks"])
    assert found["ranks"][1] == {
        "tp": 2, "rank": 1, "kvHeads": [4, 5, 6, 7], "shards": [2, 3], "replica": 0, "replicas": 1,
    }  # fmt: skip
    assert (found["stages"], found["problems"], found["cacheSplit"]) == ([], [], False)


def test_replicated_heads_show_their_replicas() -> None:
    """TP 4 on one latent head: four replicas of one shard."""
    found = plan("--kv-heads", "1", "--prefill", "4")
    assert found["storeTPSize"] == 1
    assert [(row["replica"], row["replicas"]) for row in found["ranks"]] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_layers_and_pipeline_sizes_show_stages() -> None:
    """The union of all boundaries."""
    found = plan("--kv-heads", "8", "--prefill", "2", "--pp", "1,2", "--layers", "4")
    assert found["stages"] == [{"stage": 0, "layers": [0, 1]}, {"stage": 1, "layers": [2, 3]}]


def test_sizes_that_vllm_refuses_are_all_named_with_their_field() -> None:
    """Exit 1; every problem with reason, field, message and remedy."""
    found = plan("--kv-heads", "6", "--prefill", "4,2", "--decode", "5", code=1)
    assert found["storeTPSize"] is None
    assert [(one["reason"], one["field"]) for one in found["problems"]] == [
        ("StoreTPConflict", "spec.prefill.tensorParallelSizes"),
        ("StoreTPConflict", "spec.decode.tensorParallelSizes"),
    ]
    assert all(set(one) == {"reason", "field", "message", "remedy"} for one in found["problems"])


def test_pool_file_gives_the_namespace(pool_file: pathlib.Path) -> None:
    """The same that the operator would use; standard input is read as well."""
    found = plan("-f", str(pool_file))
    assert found["cacheNamespace"].startswith("kvs1/p-")
    assert plan("-f", "-", stdin=pool_file.read_text()) == found


def test_file_without_heads_shows_shards_and_takes_the_flag(tmp_path: pathlib.Path) -> None:
    """Heads are not guessed."""
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_p1(model={"name": "org/m"})))
    found = plan("-f", str(path))
    assert found["ranks"][0]["kvHeads"] == []
    assert found["ranks"][0]["shards"] == [0, 1]
    assert plan("-f", str(path), "--kv-heads", "8")["ranks"][0]["kvHeads"] == [0, 1, 2, 3]


def edited(tmp_path: pathlib.Path, **spec: Any) -> str:
    """The path of an edited pool p1."""
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump(pool_p1(**spec)))
    return str(path)


def test_edit_that_keeps_the_cache_is_sticky(pool_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Removing the larger size."""
    found = plan("-f", edited(tmp_path, prefill={"tensorParallelSizes": [2]}), "--previous", str(pool_file))
    assert (found["storeTPSize"], found["source"], found["cacheSplit"]) == (4, "sticky", False)


def test_edit_that_moves_store_tp_splits_and_is_a_problem_unless_pinned(
    pool_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """What the API server would refuse, before it is applied."""
    moved = plan("-f", edited(tmp_path, prefill={"tensorParallelSizes": [8]}), "--previous", str(pool_file), code=1)
    assert moved["cacheSplit"] is True
    assert [one["reason"] for one in moved["problems"]] == ["StoreTPMoved"]
    pinned = plan("-f", edited(tmp_path, storeTPSize=8), "--previous", str(pool_file))
    assert (pinned["source"], pinned["cacheSplit"]) == ("pinned", True)


def test_edit_of_generation_or_block_size_splits(pool_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another namespace, or other bytes."""
    for spec in ({"model": {"name": "org/m", "kvHeads": 8, "generation": 2}}, {"cache": {"blockSizeTokens": 32}}):
        assert plan("-f", edited(tmp_path, **spec), "--previous", str(pool_file))["cacheSplit"] is True


def test_stored_status_counts_as_what_was_before(tmp_path: pathlib.Path) -> None:
    """`kubectl get -o yaml | kvshare plan -f -`."""
    pool = pool_p1(prefill={"tensorParallelSizes": [2]})
    pool["status"] = {"storeTPSize": 4, "kvHeads": 8}
    assert plan("-f", "-", stdin=yaml.safe_dump(pool))["source"] == "sticky"


def test_file_that_breaks_the_schema_names_every_mistake(tmp_path: pathlib.Path) -> None:
    """Exit 1, with field paths; a typo is a mistake too."""
    found = plan("-f", edited(tmp_path, prefill={"tensorParallelSizes": "4,2"}, onConflikt="Skip"), code=1)
    fields = {one["field"] for one in found["problems"]}
    assert fields == {"spec.prefill.tensorParallelSizes", "spec.onConflikt"}
    assert found["storeTPSize"] is None


def config(folder: pathlib.Path, **fields: object) -> str:
    """A model's file."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


GEMMA: dict[str, object] = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


def test_the_models_file_brings_heads_layers_and_kinds(tmp_path: pathlib.Path) -> None:
    """Kinds as keys name them, each with its layers and stages; also where the text part is a part of the file."""
    found = plan("--model-config", config(tmp_path, text_config=GEMMA), "--prefill", "4,2", "--pp", "1,2")
    assert (found["storeTPSize"], found["ranks"][0]["kvHeads"]) == (4, [0, 1])
    assert found["stages"] == [{"stage": 0, "layers": [0, 1]}, {"stage": 1, "layers": [2, 3]}]
    assert found["kinds"] == [
        {
            "name": "full", "retention": "full", "windowTokens": None, "layers": [1, 3], "cached": True,
            "stages": [{"stage": 0, "layers": [1]}, {"stage": 1, "layers": [3]}],
        },
        {
            "name": "window1024-", "retention": "window of 1024 tokens", "windowTokens": 1024, "layers": [0, 2],
            "stages": [{"stage": 0, "layers": [0]}, {"stage": 1, "layers": [2]}], "cached": True,
        },
    ]  # fmt: skip
    table = invoke("--model-config", config(tmp_path, **GEMMA), "--prefill", "4").stdout
    assert "Kinds of caches" in table
    assert "window of 1024 tokens" in table


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"layer_types": None, "sliding_window": None}, ["full"]),
        ({"layer_types": None, "use_sliding_window": False}, ["full"]),
        ({"layer_types": None}, []),  # which layers have the window is known to the model's code only
        ({"layer_types": None, "sliding_window": None, "mamba_d_state": 16}, []),
        ({"sliding_window": None}, ["full"]),
        ({"num_hidden_layers": None, "layer_types": None}, []),
        ({"index_topk": 2048}, []),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, ["full", "state"]),
        ({"layer_types": ["linear_attention"] * 4}, ["state"]),
        ({"layer_types": ["chunked_attention"] * 3 + ["full_attention"]}, ["full", "other"]),
    ],
)
def test_kinds_are_shown_where_the_file_says_them(
    tmp_path: pathlib.Path, fields: dict[str, object], names: list[str]
) -> None:
    """Nothing is guessed, and a model whose members will be disabled is called so."""
    found = plan("--model-config", config(tmp_path, **{**GEMMA, **fields}), "--prefill", "4")
    assert [kind["name"] for kind in found["kinds"]] == names
    cached = "other" not in names and names != ["state"]
    assert all(kind["cached"] is cached for kind in found["kinds"])
    assert ("SeveralKinds" in invoke("--model-config", str(tmp_path / "config.json"), "--prefill", "4").stdout) is not (
        cached
    )


def test_every_layer_of_states_is_a_stage(tmp_path: pathlib.Path) -> None:
    """And who reads them is said."""
    types = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
    path = config(tmp_path, **{**GEMMA, **types})
    (_, state) = plan("--model-config", path, "--prefill", "4", "--pp", "1,2")["kinds"]
    assert state["stages"] == [{"stage": n, "layers": [layer]} for n, layer in enumerate((0, 1, 3))]
    assert "state, read by one TP size" in invoke("--model-config", path, "--prefill", "4").stdout


def test_a_latent_head_is_one_head(tmp_path: pathlib.Path) -> None:
    """MLA, whatever the file calls its attention heads."""
    path = config(tmp_path, num_hidden_layers=2, num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512)
    assert plan("--model-config", path, "--prefill", "8")["storeTPSize"] == 1


SPARSE: dict[str, object] = {
    "model_type": "deepseek_v32", "num_hidden_layers": 4, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["full", "indexer"]),
        ({"index_topk_freq": 4}, []),  # which layers have an indexer follows from the model's code
        ({"index_topk_pattern": "FSSS"}, []),
        ({"index_head_dim": 64}, []),
        ({"model_type": "deepseek_v4"}, []),
        ({"model_type": ["deepseek_v32"]}, []),
        ({"kv_lora_rank": None}, []),
        ({"index_topk": None}, ["full"]),
    ],
)
def test_indexers_are_a_kind_of_their_own(tmp_path: pathlib.Path, fields: dict[str, object], names: list[str]) -> None:
    """DeepSeek V3.2: two caches in every layer; both are named as in keys."""
    found = plan("--model-config", config(tmp_path, **{**SPARSE, **fields}), "--prefill", "4")
    assert [kind["name"] for kind in found["kinds"]] == names
    assert all(kind["cached"] and kind["layers"] == [0, 1, 2, 3] for kind in found["kinds"])
    if len(names) == 2:
        assert found["kinds"][1]["retention"] == "indexer"
        assert found["storeTPSize"] == 1


@pytest.mark.parametrize(("tokens", "code"), [(16, 1), (64, 0), (128, 1)])
def test_a_pool_for_indexers_needs_the_block_of_their_kernels(tmp_path: pathlib.Path, tokens: int, code: int) -> None:
    """The pool's block size becomes a flag, with which vLLM would find no backend and not start."""
    pool = {
        "apiVersion": "kvshare.dev/v1alpha1", "kind": "KVSharePool", "metadata": {"name": "v32", "namespace": "ns"},
        "spec": {
            "model": {"name": "org/m"}, "prefill": {"tensorParallelSizes": [8]}, "cache": {"blockSizeTokens": tokens},
            "store": {"type": "External", "external": {"masterAddress": "m.ns.svc:50051"}},
        },
    }  # fmt: skip
    file = tmp_path / "pool.json"
    file.write_text(json.dumps(pool))
    found = invoke("-f", str(file), "--model-config", config(tmp_path, **SPARSE), "-o", "json")
    assert found.exit_code == code
    assert [one["field"] for one in json.loads(found.stdout)["problems"]] == ["spec.cache.blockSizeTokens"] * code


def test_a_pool_and_its_models_file(pool_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The file fills in what the pool leaves open."""
    found = plan("-f", str(pool_file), "--model-config", config(tmp_path, **GEMMA))
    assert len(found["kinds"]) == 2
    assert found["ranks"][0]["kvHeads"] != []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "JSON object"),
        ("{", "not JSON"),
        ('{"num_hidden_layers": "4", "num_key_value_heads": -1}', "num_key_value_heads"),
        ('{"num_hidden_layers": 3, "layer_types": ["full_attention"]}', "one for each of 3 layers"),
        ('{"layer_types": [1]}', "list of words"),
    ],
)
def test_a_file_that_is_no_models_is_wrong_usage(tmp_path: pathlib.Path, text: str, said: str) -> None:
    """With every mistake in it."""
    (tmp_path / "config.json").write_text(text)
    result = invoke("--model-config", str(tmp_path / "config.json"), "--prefill", "4")
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_a_flag_that_contradicts_the_models_file_is_wrong_usage(tmp_path: pathlib.Path) -> None:
    """Neither of the two is taken."""
    path = config(tmp_path, **GEMMA)
    assert invoke("--model-config", path, "--prefill", "4", "--kv-heads", "8").exit_code == 2
    assert invoke("--model-config", path, "--prefill", "4", "--layers", "8").exit_code == 2


USAGE = {
    "nothing": [],
    "a model's file that does not exist": ["--model-config", "/nonexistent.json", "--prefill", "4"],
    "heads without sizes": ["--kv-heads", "8"],
    "sizes without heads": ["--prefill", "4"],
    "a size that is no number": ["--kv-heads", "8", "--prefill", "four"],
    "a size of zero": ["--kv-heads", "8", "--prefill", "0"],
    "heads of zero": ["--kv-heads", "0", "--prefill", "1"],
    "a file that does not exist": ["-f", "/nonexistent.yaml"],
    "a file and sizes": ["-f", "x.yaml", "--prefill", "4"],
    "an unknown output": ["--kv-heads", "8", "--prefill", "4", "-o", "xml"],
}


@pytest.mark.parametrize("words", USAGE.values(), ids=USAGE.keys())
def test_wrong_usage_is_code_two(words: list[str]) -> None:
    """Whatever is missing or wrong about the words themselves."""
    assert invoke(*words).exit_code == 2


def test_file_without_exactly_one_pool_is_wrong_usage(tmp_path: pathlib.Path) -> None:
    """Not YAML, no pool, two pools, another version."""
    pool = pool_p1()
    for text in (
        "{", "a: b", yaml.safe_dump_all([pool, pool]), yaml.safe_dump({**pool, "apiVersion": "kvshare.dev/v9"}), "- 1",
    ):  # fmt: skip
        path = tmp_path / "x.yaml"
        path.write_text(text)
        assert invoke("-f", str(path)).exit_code == 2


@pytest.mark.parametrize(
    ("name", "works"),
    [("a", True), ("a-1", True), ("a" * 63, True), ("a" * 64, False), ("a.b", False), ("A", False), ("-", False)],
)
def test_names_that_the_api_server_refuses_are_a_problem_of_the_plan(
    tmp_path: pathlib.Path, name: str, works: bool
) -> None:
    """The name becomes a label value and part of Service names; the rest of the plan is shown all the same."""
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump({**pool_p1(), "metadata": {"name": name}}))
    result = invoke("-f", str(path), "-o", "json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["storeTPSize"]) == (0 if works else 1, 4)
    assert [problem["field"] for problem in found["problems"]] == ([] if works else ["metadata.name"])


def test_table_is_plain_text_when_it_is_piped(pool_file: pathlib.Path) -> None:
    """No colour codes in a file."""
    result = invoke("-f", str(pool_file), "--layers", "4")
    assert result.exit_code == 0
    assert "Store TP 4 (lcm)" in result.stdout
    assert "\x1b[" not in result.stdout


def test_help_has_examples() -> None:
    """People copy them."""
    assert "kvshare plan --kv-heads 8 --prefill 4,2 --decode 2" in invoke("--help").stdout


def test_command_needs_no_cluster_package_and_no_torch() -> None:
    """It runs on a laptop with the extra `cli` only."""
    code = (
        "import sys; sys.path[:0] = ['operator', 'connector']\n"
        "import kvshare_operator.cli.main\n"
        "bad = {'torch', 'kopf', 'aiohttp', 'vllm', 'kubernetes', 'mooncake', 'cryptography'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=pathlib.Path(__file__).parents[2])
