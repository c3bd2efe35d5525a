"""What a person may choose for the demo."""

import pytest

from testbed.demo.settings import SettingsError, from_environment


def test_nothing_chosen_gives_prefill_4_and_2_and_decode_1() -> None:
    """The default pool has Store TP 4 and runs the smallest size of each side."""
    settings = from_environment({})
    assert (settings.prefill_sizes, settings.decode_sizes) == ((4, 2), (1,))
    assert (settings.prefill_tp, settings.decode_tp, settings.store_tp) == (2, 1, 4)


@pytest.mark.parametrize(("prefill", "decode", "store_tp"), [("2", "2", 2), ("2", "4", 4), ("8", "1", 4)])
def test_store_tp_is_the_multiple_of_the_effective_sizes(prefill: str, decode: str, store_tp: int) -> None:
    """A size above the model's four KV heads counts as four."""
    assert from_environment({"PREFILL": prefill, "DECODE": decode}).store_tp == store_tp


def test_all_mistakes_are_told_at_once() -> None:
    """A size that the model cannot be split by, and everything that an existing cluster lacks."""
    with pytest.raises(SettingsError) as told:
        from_environment({"PREFILL": "3", "DECODE": "x", "CLUSTER": "existing"})
    text = str(told.value)
    for part in ("PREFILL=3", "DECODE=x", "KUBECONFIG", "IMAGE_REGISTRY", "VLLM_IMAGE"):
        assert part in text
