"""Manifests of the demo are what a user would write."""

from testbed.demo.manifests import render


def engine(**annotations: str) -> dict[str, object]:
    """The engine's Deployment with these annotations."""
    (made,) = render(
        "engine",
        name="decode",
        annotations=annotations,
        image="vllm:1",
        pull_policy="Never",
        model="/models/m",
        arguments=["--tensor-parallel-size=1"],
        environment=[],
    )
    return made


def test_annotations_are_all_that_an_engine_knows_of_the_product() -> None:
    """Without its annotations the manifest does not contain the product's name."""
    assert "kvshare" not in str(engine()).lower()
    assert "kv-transfer" not in str(engine(**{"kvshare.dev/pool": "demo"}))


def test_variables_of_kubernetes_stay_as_they_are() -> None:
    """`$(POD_IP)` is for the kubelet, not for the template."""
    objects = render("store", image="i", pull_policy="Never")
    assert "--rpc_address=$(POD_IP)" in str(objects)
