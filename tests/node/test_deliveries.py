"""Ways of bringing the connector into an engine, each on a real engine that stores and reads.

An init container, the default, brings it in every other story of the node. Here are the other two: an image volume,
and an engine image that has the connector itself (made of the same payload, mounted by the pod's author).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed import places
from testbed.cluster import cluster
from testbed.completions import Answer
from testbed.demo import engines
from testbed.demo.engines import DemoEngine
from testbed.demo.place import OwnCluster
from testbed.demo.settings import Settings
from testbed.demo.steps import NAMESPACE, PROMPT_TOKENS, Demo, text_tokens, whole_blocks
from testbed.kubectl import Object

pytestmark = pytest.mark.scenario
ENGINE = DemoEngine("decode", 1, "HND", "both")
SETTINGS = Settings(prefill_sizes=(2,), decode_sizes=(1,))


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """The product, a store, and a pool."""
    with cluster(places.CACHE / "cluster" / "delivery-tests", images=OwnCluster.archives()) as running:
        made = Demo(OwnCluster(running), SETTINGS, lambda text: print(text, flush=True))
        made.install_product()
        made.start_store()
        made.apply_pool()
        yield made


def deliver(demo: Demo, source: str, *, own: bool = False) -> Object:
    """Set the pool's delivery, start the engine in a fresh pod, and return that pod."""
    patch = f'{{"spec": {{"connector": {{"source": "{source}"}}}}}}'
    demo.kubectl.run("patch", "kvsharepool", "demo", "--type=merge", f"--patch={patch}")
    generation = demo.pool()["metadata"]["generation"]
    demo.kubectl.wait_for(
        "the edit is seen", lambda: demo.pool()["status"]["observedGeneration"] == generation, seconds=60
    )
    made = engines.deployment(ENGINE, demo.place, SETTINGS)
    template = made["spec"]["template"]
    template["metadata"]["annotations"]["kvshare.test/delivery"] = source
    if own:
        container, spec = template["spec"]["containers"][0], template["spec"]
        image = {"reference": demo.place.connector_image, "pullPolicy": "Never"}
        spec["volumes"].append({"name": "own", "image": image})
        mount = {"name": "own", "mountPath": "/opt/own", "subPath": "kvshare/python", "readOnly": True}
        container["volumeMounts"].append(mount)
        container["env"].append({"name": "PYTHONPATH", "value": "/opt/own"})
    demo.kubectl.apply(made)
    demo.kubectl.wait_for_deployment(ENGINE.name, seconds=600)
    return demo.kubectl.pod(ENGINE.selector)


def ask(demo: Demo) -> Answer:
    """The same prompt, and then wait until its blocks are in the store."""
    answer = engines.server(ENGINE, demo.place, NAMESPACE).complete(text_tokens(PROMPT_TOKENS, salt=1))
    demo.wait_for_writes()
    return answer


def shared(demo: Demo) -> bool:
    """Whether the one member reports that it shares."""
    return bool(demo.pool()["status"]["members"]["shared"] == 1)


ANSWERS: list[Answer] = []


def test_image_volume_brings_the_connector_into_a_real_engine(demo: Demo) -> None:
    """B48, B46: no init container, nothing copied; the engine computes, stores, and is a member that shares."""
    pod = deliver(demo, "ImageVolume")
    assert "initContainers" not in pod["spec"]
    assert any("image" in volume and volume["name"] == "kvshare-payload" for volume in pod["spec"]["volumes"])
    ANSWERS.append(ask(demo))
    assert ANSWERS[0].cached_tokens == 0
    demo.kubectl.wait_for("the member shares", lambda: shared(demo), seconds=60)


def test_engine_whose_image_has_the_connector_reads_the_same_blocks(demo: Demo) -> None:
    """B29: nothing is delivered and PYTHONPATH stays the author's; another revision, the same cache."""
    pod = deliver(demo, "Image", own=True)
    assert "initContainers" not in pod["spec"]
    assert not any(volume["name"] == "kvshare-payload" for volume in pod["spec"]["volumes"])
    (path,) = [one["value"] for one in pod["spec"]["containers"][0]["env"] if one["name"] == "PYTHONPATH"]
    assert path == "/opt/own"
    answer = ask(demo)
    assert answer.cached_tokens == whole_blocks(PROMPT_TOKENS - 1)
    assert answer.token_ids == ANSWERS[0].token_ids
    demo.kubectl.wait_for("the member shares", lambda: shared(demo), seconds=60)
