"""The demo's steps on a real one-node cluster, and the loss of a pod in the middle of them.

The tests of this file are one story: each goes on where the one before stopped.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gathered import gathered
from helm_chart import rendered, without_hooks
from kvshare_operator.api import names
from permissions import problems
from testbed import places
from testbed.audit import requests
from testbed.cluster import cluster
from testbed.demo.place import OwnCluster
from testbed.demo.settings import Settings
from testbed.demo.steps import Demo, condition

pytestmark = pytest.mark.node


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """The product, a store, a pool and all engines on a fresh cluster."""
    with cluster(places.CACHE / "cluster" / "node-tests", images=OwnCluster.archives()) as running:
        made = Demo(OwnCluster(running), Settings(), lambda text: print(text, flush=True))
        made.install_product()
        made.start_store()
        made.apply_pool()
        made.start_engines()
        yield made


def test_pool_of_prefill_4_and_2_and_decode_1_has_store_tp_4(demo: Demo) -> None:
    """The Store TP size is the least common multiple of all sizes."""
    assert demo.pool()["status"]["storeTPSize"] == 4


def test_first_prefill_computes_everything(demo: Demo) -> None:
    """An empty store gives nothing, and the answer is the reference's."""
    row = demo.prefill_writes()
    assert row.right, row


def test_decode_of_another_size_and_layout_reads_all_whole_blocks(demo: Demo) -> None:
    """TP 1 head-major takes 960 of 976 tokens from what TP 2 token-major stored."""
    row = demo.decode_reads()
    assert (row.cached_tokens, row.prompt_tokens) == (960, 976)
    assert row.right, row


def test_deleted_decode_pod_changes_nothing(demo: Demo) -> None:
    """A new pod starts with an empty cache of its own and reads the same blocks from the store."""
    demo.delete_pod(demo.decode)
    row = demo.decode_reads()
    assert row.right, row


def test_decode_continues_the_conversation(demo: Demo) -> None:
    """A longer conversation extends what decode has, and is written back."""
    row = demo.decode_continues()
    assert row.right, row


def test_prefill_reads_what_decode_wrote_back(demo: Demo) -> None:
    """Prompt and generated tokens that TP 1 computed are hits for TP 2."""
    row = demo.prefill_reads_back()
    assert row.right, row


def test_pod_with_a_size_that_fits_no_shard_is_refused(demo: Demo) -> None:
    """TP 3 is denied at admission, with the size in the answer."""
    demo.refuse_wrong_size()
    assert demo.report.problems == []
    assert "3" in demo.report.refusal


def test_pool_names_both_members_as_shared(demo: Demo) -> None:
    """The status tells that the members agree."""
    demo.finish()
    assert demo.report.problems == []
    assert condition(demo.report.pool, "MembersConsistent") == "True"
    assert condition(demo.report.pool, "Ready") == "True"


def test_gathered_archive_has_the_real_logs_of_members_and_operator(demo: Demo, tmp_path: Path) -> None:
    """Lines that the kubelet kept: the operator's own, and of engines what KVShare said, but no prompt."""
    texts = gathered(demo.kubectl.kubeconfig, tmp_path / "gathered.tar.gz", "-A")
    logs = {name: text for name, text in texts.items() if "/logs/" in name and name.endswith(".log")}
    members = {name: text for name, text in logs.items() if name.startswith("pools/") and name.endswith(".vllm.log")}
    assert {name.rpartition("/")[2].partition("-")[0] for name in members} == {"prefill", "decode"}
    assert all("verdict: shared" in text for text in members.values())
    assert all("/v1/completions HTTP" not in text for text in members.values())  # what is not about us
    payloads = [name for name in logs if name.endswith(f".{names.PAYLOAD_CONTAINER}.log")]
    assert len(payloads) == len(members)
    operator = [name for name, text in logs.items() if name.startswith("operator/") and text.strip()]
    assert any("controller" in name for name in operator)
    assert any("webhook" in name for name in operator)
    assert "log of" not in texts.get("missing.txt", "")


def test_operator_was_refused_nothing_and_did_only_what_the_chart_grants(demo: Demo) -> None:
    """Every request of both processes in this story, from the API server's audit log."""
    recorded = set(requests(demo.kubectl.kubeconfig.parent))
    assert {request.account for request in recorded} >= {"kvshare-controller", "kvshare-webhook"}
    found = problems(without_hooks(rendered()), recorded)
    # What this story has no use for, such as managed stores, is used in test_installation.py.
    assert [one for one in found if not one.endswith("nothing used it")] == []
