"""The main faults with two kinds of caches: windows of 128 tokens, or recurrent states, beside full attention.

Blocks of windows and states are saved while they are there, a load is right as a whole only, and a failure is told by
request.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from testbed import reliability
from testbed.fault_trials import (
    Fault,
    Outcome,
    Pair,
    Setup,
    hanging_up,
    judge,
    killing_a_node,
    killing_the_master,
    losing_objects,
    pair,
)
from testbed.tiny_families import STATES_IN_FLOAT32, tiny_gemma, tiny_qwen_next
from testbed.traffic import Texts

pytestmark = pytest.mark.faults


@dataclass(frozen=True)
class Hybrid:
    """Engines of one model.

    Attributes:
        name: prefix of its trials.
        setup: what the engines run.
        small: arguments of an engine whose requests are preempted all the time; empty when none would be.
        answers: length of the answers by trial.
    """

    name: str
    setup: Setup
    small: tuple[str, ...]
    answers: Mapping[str, int]


def hybrid(name: str) -> Hybrid:
    """The engines of a model, which is made when it is not there."""
    if name == "windows":
        # 5 % of an engine's own blocks may be pinned, enough for the end of a window and more.
        setup = Setup(tiny_gemma(), arguments=("--num-gpu-blocks-override=360",))
        return Hybrid(name, setup, ("--num-gpu-blocks-override=60", "--max-model-len=512"), reliability.answers(name))
    # States are shared by engines of one TP size, in blocks of 544 tokens. The kernels know bfloat16 only, which tells
    # logits of this size apart by steps of 1/64: answers that hang on less than three of them are not asked for.
    setup = Setup(
        tiny_qwen_next(), sizes=((1, "HND"), (1, "HND")), reference=False, dtype="bfloat16", margin=2.5 / 64,
        arguments=("--num-gpu-blocks-override=60", STATES_IN_FLOAT32),
        texts=Texts(block=544, families=30, members=2, common_blocks=1, recovery_blocks=1),
    )  # fmt: skip
    return Hybrid(name, setup, (), reliability.answers(name, short=4))


@dataclass
class Place:
    """A pair of engines and which model they run."""

    engines: Pair
    model: Hybrid

    def trial(self, name: str, title: str, fault: Fault, *, seconds: float = 7) -> Outcome:
        """Run a trial under the model's name."""
        full, words = f"{self.model.name}-{name}", f"{self.model.name}: {title}"
        return reliability.trial(self.engines, full, words, fault, seconds=seconds)


@pytest.fixture(scope="module", params=reliability.HYBRIDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Both engines, and the latencies of a run without any fault."""
    model = hybrid(request.param)
    with pair(tmp_path_factory.mktemp(model.name), model.answers, model.setup) as made:
        reliability.measure_calm(made, f"{model.name}-calm", f"{model.name}: nothing")
        yield Place(made, model)


def test_sharing_works_while_nothing_goes_wrong(place: Place) -> None:
    """The yardstick: both engines load what the other has saved."""
    assert place.engines.first is not None
    judge(place.engines, place.engines.first)
    assert place.engines.first.seen["loaded blocks"] > 0


def test_objects_that_vanish_between_lookup_and_load(place: Place) -> None:
    """A third of all loads finds objects of either kind gone: each such request is computed from its own hit."""
    outcome = place.trial("removed", "objects removed before 30 % of loads", losing_objects)
    assert outcome.seen["get OBJECT_NOT_FOUND"] > 0


def test_prompts_that_are_aborted_while_they_load(place: Place) -> None:
    """Blocks of either kind that a dead request waited for are not written for a living one."""
    place.trial("aborted", "clients hang up while their prompts load", hanging_up)


def test_a_store_node_that_dies(place: Place) -> None:
    """Half of the objects are gone, of some blocks one kind."""
    place.trial("node-killed", "one of two store nodes is killed", killing_a_node, seconds=12)


def test_the_master_dies_and_starts_again(place: Place) -> None:
    """All keys are lost; both kinds are stored anew."""
    place.trial("master-killed", "the master is killed and started again", killing_the_master, seconds=8)


def test_requests_that_are_preempted_all_the_time(place: Place) -> None:
    """The groups share the cache, and requests lose the blocks of all of them."""
    if not place.model.small:
        pytest.skip("blocks are so large that an answer needs no further one")
    place.engines.reader.engine.process.kill()
    place.engines.start_again(1, arguments=place.model.small)
    title = "a cache so small that requests are preempted"
    place.trial("preempted", title, lambda *_: contextlib.nullcontext())
    assert place.engines.reader.server.metric("vllm:num_preemptions_total") > 0
