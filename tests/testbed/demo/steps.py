"""The demo's steps, each a method that changes the cluster or asks an engine; the end-to-end tests use them too.

A step that asks returns a `Row`; what the row must be is computed here, from the lengths alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx

from testbed.demo import engines, product
from testbed.demo.engines import DemoEngine
from testbed.demo.manifests import render
from testbed.demo.place import MODEL, Place
from testbed.demo.report import Report, Row
from testbed.demo.settings import Settings
from testbed.kubectl import KubectlError, Object

NAMESPACE = "kvshare-demo"
BLOCK_TOKENS = 32
PROMPT_TOKENS = 976
ANSWER_TOKENS = 16
CONVERSATION_TOKENS = 208
LONG_ANSWER_TOKENS = 200
LAST_QUESTION_TOKENS = 60
ENGINE_SECONDS = 600
FAILED_KEYS = "kvshare_failed_keys_total"


def text_tokens(count: int, salt: int) -> list[int]:
    """Printable bytes, the same for the same arguments: a prompt that no other salt begins with."""
    state = salt
    tokens = []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        tokens.append(32 + (state >> 16) % 95)
    return tokens


def whole_blocks(tokens: int) -> int:
    """How many of these tokens lie in complete blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


class Demo:
    """One demo on one cluster."""

    def __init__(self, place: Place, settings: Settings, say: Callable[[str], None]) -> None:
        self.place = place
        self.settings = settings
        self.say = say
        self.report = Report()
        self.kubectl = place.kubectl.within(NAMESPACE)
        self.prefill, self.decode = engines.members(settings)
        self.references = {engine.tp: engine for engine in engines.references(settings)}
        self.prompt = text_tokens(PROMPT_TOKENS, salt=1)
        self._answers: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def timed(self, part: str, what: str) -> Iterator[None]:
        """Announce a part, and note how long it took."""
        self.say(what)
        start = time.monotonic()
        yield
        self.report.seconds[part] = time.monotonic() - start
        self.say(f"    {self.report.seconds[part]:.0f} s")

    def install_product(self) -> None:
        """`helm install` the chart into a namespace that enforces the restricted pod security standard."""
        with self.timed("product", "installing the product: helm install charts/kvshare"):
            product.install(self.place)

    def start_store(self) -> None:
        """Start a Mooncake master and a store node as pods."""
        with self.timed("store", "starting a Mooncake master and a store node"):
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
            self.place.kubectl.apply(namespace)
            objects = render("store", image=self.place.engine_image, pull_policy=self.place.pull_policy)
            for thing in objects:
                if thing["kind"] == "Deployment":
                    pod = thing["spec"]["template"]["spec"]
                    pod["securityContext"] = {"runAsNonRoot": True, "runAsUser": 65532}
                    self.place.complete_pod(pod)
                    pod.pop("initContainers", None)
            self.kubectl.apply(*self.place.extra_objects(), *objects)
            for name in ("mooncake-master", "mooncake-store"):
                self.kubectl.wait_for_deployment(name, seconds=300)

    def apply_pool(self) -> None:
        """Apply the KVSharePool and wait until it is Ready."""
        with self.timed("pool", "applying the KVSharePool"):
            (pool,) = render(
                "pool",
                namespace=NAMESPACE,
                model=MODEL,
                prefill_sizes=list(self.settings.prefill_sizes),
                decode_sizes=list(self.settings.decode_sizes),
            )
            self.kubectl.apply(pool)
            self.kubectl.wait_for(
                "the KVSharePool is Ready",
                lambda: condition(self.pool(), "Ready") == "True",
                seconds=180,
                about=lambda: self.kubectl.describe("kvsharepool", "demo"),
            )
        self.say(self.kubectl.run("get", "kvsharepool"))

    def start_engines(self) -> None:
        """Apply all engines and wait until they serve; slow, because every one imports vLLM on two cores."""
        everyone = (self.prefill, self.decode, *self.references.values())
        names = ", ".join(f"{engine.name} (TP {engine.tp}, {engine.layout})" for engine in everyone)
        with self.timed("engines", f"starting engines: {names}"):
            self.kubectl.apply(*(engines.deployment(engine, self.place, self.settings) for engine in everyone))
            for engine in everyone:
                self.kubectl.wait_for_deployment(engine.name, seconds=ENGINE_SECONDS)

    def pool(self) -> Object:
        """The KVSharePool as it is now."""
        return self.kubectl.get("kvsharepool", "demo")

    def prefill_writes(self) -> Row:
        """The prefill engine computes the prompt and stores its blocks."""
        return self.ask("prefill computes and stores", self.prefill, self.prompt, expected_cached=0)

    def decode_reads(self) -> Row:
        """The decode engine finds all whole blocks of the same prompt in the store."""
        expected = whole_blocks(PROMPT_TOKENS - 1)
        return self.ask("decode reads what prefill stored", self.decode, self.prompt, expected_cached=expected)

    def conversation(self) -> list[int]:
        """The prompt, decode's answer to it, and a second question."""
        return [*self.prompt, *self._answers["decode"], *text_tokens(CONVERSATION_TOKENS, salt=2)]

    def decode_continues(self) -> Row:
        """The decode engine goes on with the conversation; its new blocks are written back."""
        known = whole_blocks(PROMPT_TOKENS + ANSWER_TOKENS - 1)
        return self.ask(
            "decode continues the conversation, writes back",
            self.decode,
            self.conversation(),
            expected_cached=known,
            max_tokens=LONG_ANSWER_TOKENS,
            remember="conversation",
        )

    def prefill_reads_back(self) -> Row:
        """The prefill engine finds what decode computed: prompt and generated tokens of the conversation."""
        before = [*self.conversation(), *self._answers["conversation"]]
        return self.ask(
            "prefill reads what decode wrote back",
            self.prefill,
            [*before, *text_tokens(LAST_QUESTION_TOKENS, salt=3)],
            # The last generated token was never computed: it was only sampled.
            expected_cached=whole_blocks(len(before) - 1),
        )

    def refuse_wrong_size(self) -> None:
        """Try to create a pod whose tensor-parallel size fits no pool member; the API server must refuse it."""
        (pod,) = render(
            "refused-pod",
            image=self.place.engine_image,
            pull_policy=self.place.pull_policy,
            model=MODEL,
            tp=self.settings.refused_tp,
        )
        try:
            self.kubectl.create(pod)
        except KubectlError as error:
            self.report.refusal = error.answer
            if "denied the request" not in error.answer:
                self.report.problems.append(f"the TP 3 pod was refused by somebody else: {error.answer}")
        else:
            self.kubectl.delete("pod", "refused", "--wait=false")
            self.report.problems.append("the pod with TP 3 was accepted; expected a refusal")

    def finish(self) -> None:
        """Wait for the members' reports, and note the pool's final state."""
        try:
            self.kubectl.wait_for(
                "both members are reported as shared",
                lambda: self.pool()["status"].get("members", {}).get("shared") == 2,
                seconds=180,
            )
        except Exception as error:
            self.report.problems.append(str(error).strip())
        self.report.pool = self.pool()
        found = self.report.pool.get("status", {}).get("storeTPSize")
        if found != self.settings.store_tp:
            self.report.problems.append(f"the pool's Store TP is {found}, expected {self.settings.store_tp}")

    def delete_pod(self, engine: DemoEngine) -> None:
        """Delete an engine's pod as a person would, and wait for the new one."""
        old = self.kubectl.pod(engine.selector)["metadata"]["name"]
        self.kubectl.run("delete", "pod", old)
        self.kubectl.wait_for_deployment(engine.name, seconds=ENGINE_SECONDS)
        self.kubectl.wait_for(
            f"{engine.name} has a new pod",
            lambda: self.kubectl.pod(engine.selector)["metadata"]["name"] != old,
            seconds=180,
        )

    def ask(
        self,
        step: str,
        engine: DemoEngine,
        prompt: Sequence[int],
        *,
        expected_cached: int,
        max_tokens: int = ANSWER_TOKENS,
        remember: str | None = None,
    ) -> Row:
        """Ask an engine and the reference of its size, and wait until the engine's writes are in the store."""
        server = engines.server(engine, self.place, NAMESPACE)
        reference = engines.server(self.references[engine.tp], self.place, NAMESPACE)
        failed = server.metric(FAILED_KEYS)
        answer = server.complete(prompt, max_tokens=max_tokens)
        expected = reference.complete(prompt, max_tokens=max_tokens)
        self.wait_for_writes()
        row = Row(
            step=step,
            engine=engine.name,
            tp=engine.tp,
            layout=engine.layout,
            cached_tokens=answer.cached_tokens,
            prompt_tokens=answer.prompt_tokens,
            tokens_match=answer.token_ids == expected.token_ids,
            failed_keys=int(server.metric(FAILED_KEYS) - failed),
            expected_cached=expected_cached,
        )
        self._answers[remember or engine.name] = answer.token_ids
        self.report.rows.append(row)
        cached = f"{row.cached_tokens} of {row.prompt_tokens} prompt tokens cached"
        self.say(f"    {step}: {cached}, tokens {'match' if row.tokens_match else 'DIFFER'}")
        return row

    def wait_for_writes(self, looks: int = 15, limit_seconds: float = 60) -> None:
        """Wait until the number of keys in the store has stood still; saving goes on behind the answer.

        Looks are counted, not seconds: nothing is written while the whole machine stands still.
        """
        url = self.place.url(self.kubectl, "app=mooncake-master", 9003)
        deadline = time.monotonic() + limit_seconds
        count, same = -1, 0
        while same < looks and time.monotonic() < deadline:
            found = len(httpx.get(f"{url}/get_all_keys", timeout=30).text.splitlines())
            same = same + 1 if found == count else 0
            count = found
            time.sleep(0.2)


def condition(thing: Object, kind: str) -> str:
    """The status of a condition; empty when the object does not have it."""
    for entry in thing.get("status", {}).get("conditions", ()):
        if entry["type"] == kind:
            return str(entry["status"])
    return ""
