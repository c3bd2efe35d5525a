"""kubectl as functions: objects in and out, errors with the API server's own words."""

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.prepare.go_programs import program

Object = dict[str, Any]


class KubectlError(Exception):
    """kubectl ended with an error; `answer` is what it printed."""

    def __init__(self, command: Sequence[str], answer: str) -> None:
        self.command = tuple(command)
        self.answer = answer.strip()
        super().__init__(f"kubectl {shlex.join(self.command)}: {self.answer}")


class NotTrueInTimeError(Exception):
    """Something in the cluster did not become true; the text has what is known about it."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one cluster, by default in one namespace."""

    kubeconfig: Path
    namespace: str = "default"

    def within(self, namespace: str) -> "Kubectl":
        """The same cluster, another namespace."""
        return Kubectl(self.kubeconfig, namespace)

    def run(self, *words: str, stdin: str | None = None, timeout: float = 120) -> str:
        """Run kubectl and return what it prints.

        Raises:
            KubectlError: if it fails.
        """
        options = ["--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace]
        finished = subprocess.run(
            [program("kubectl"), *options, *words],
            input="" if stdin is None else stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        if finished.returncode != 0:
            raise KubectlError(words, finished.stderr or finished.stdout)
        return finished.stdout

    def apply(self, *objects: Mapping[str, Any] | str) -> str:
        """Server-side apply of objects, each a mapping or YAML text.

        Raises:
            KubectlError: with the API server's answer, for example an admission denial.
        """
        texts = [thing if isinstance(thing, str) else json.dumps(thing) for thing in objects]
        return self.run("apply", "--server-side", "-f", "-", stdin="\n---\n".join(texts))

    def create(self, thing: Mapping[str, Any] | str) -> str:
        """Create one object.

        Raises:
            KubectlError: with the API server's answer, for example an admission denial.
        """
        return self.run("create", "-f", "-", stdin=thing if isinstance(thing, str) else json.dumps(thing))

    def get(self, kind: str, name: str) -> Object:
        """One object.

        Raises:
            KubectlError: if there is none.
        """
        found: Object = json.loads(self.run("get", kind, name, "-o", "json"))
        return found

    def list(self, kind: str, selector: str = "") -> "list[Object]":
        """All objects of a kind that a label selector matches."""
        found = json.loads(self.run("get", kind, "-o", "json", f"--selector={selector}"))
        items: list[Object] = found["items"]
        return items

    def delete(self, kind: str, name: str, *options: str) -> str:
        """Delete one object, which need not exist."""
        return self.run("delete", kind, name, "--ignore-not-found", *options)

    def describe(self, kind: str, name: str) -> str:
        """What `kubectl describe` says."""
        return self.run("describe", kind, name)

    def logs(self, pod: str, container: str | None = None, tail: int = 40) -> str:
        """The last lines of a container, the previous run's when the present one has none; never raises."""
        chosen = ["--all-containers"] if container is None else [f"--container={container}"]
        for previous in ([], ["--previous"]):
            try:
                text = self.run("logs", pod, *chosen, f"--tail={tail}", *previous)
            except (KubectlError, subprocess.TimeoutExpired) as error:
                text = str(error)
            else:
                if text.strip():
                    return text
        return text

    def execute(self, pod: str, *command: str, container: str | None = None, timeout: float = 120) -> str:
        """Run a command in a pod and return what it prints.

        Raises:
            KubectlError: if it fails.
        """
        chosen = [] if container is None else [f"--container={container}"]
        return self.run("exec", pod, *chosen, "--", *command, timeout=timeout)

    def wait_for(
        self,
        what: str,
        ready: Callable[[], bool],
        *,
        seconds: float,
        about: Callable[[], str] = lambda: "",
        pause: float = 0.5,
    ) -> None:
        """Ask again and again until `ready` says yes.

        Args:
            what: for the error, for example `deployment demo/prefill is available`.
            ready: the question; a `KubectlError` counts as no.
            seconds: time limit.
            about: called for the error's text when the time is over.
            pause: seconds between two questions.

        Raises:
            NotTrueInTimeError: with `about`.
        """
        deadline = time.monotonic() + seconds
        last = ""
        while True:
            try:
                if ready():
                    return
            except KubectlError as error:
                last = f"\n{error}"
            if time.monotonic() > deadline:
                raise NotTrueInTimeError(f"not true after {seconds:.0f} s: {what}{last}\n{about()}")
            time.sleep(pause)

    def wait_for_deployment(self, name: str, *, seconds: float, kind: str = "deployment") -> None:
        """Wait until all replicas of a Deployment (or StatefulSet) are ready; explains when not."""

        def ready() -> bool:
            found = self.get(kind, name)
            labels = found["spec"]["selector"]["matchLabels"]
            for pod in self.list("pods", ",".join(f"{key}={value}" for key, value in labels.items())):
                problem = _hopeless(pod)
                if problem:
                    raise NotTrueInTimeError(
                        f"{kind} {self.namespace}/{name} will not become ready: {problem}\n{self.what_happens()}"
                    )
            status = found.get("status", {})
            wanted = found["spec"].get("replicas", 1)
            current = status.get("observedGeneration", 0) >= found["metadata"]["generation"]
            return bool(
                current and status.get("readyReplicas", 0) == wanted and status.get("updatedReplicas", 0) == wanted
            )

        self.wait_for(f"{kind} {self.namespace}/{name} is ready", ready, seconds=seconds, about=self.what_happens)

    def what_happens(self) -> str:
        """Pods, latest events and logs of unready containers of the namespace, for error messages."""
        parts = []
        for title, words in (
            ("pods", ("get", "pods", "-o", "wide")),
            ("events", ("get", "events", "--sort-by=.lastTimestamp")),
        ):
            try:
                parts.append(f"-- {title}\n" + "\n".join(self.run(*words).splitlines()[-25:]))
            except KubectlError as error:
                parts.append(f"-- {title}: {error}")
        try:
            for pod in self.list("pods"):
                status = pod.get("status", {})
                everything = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
                for container in everything:
                    finished = container.get("state", {}).get("terminated", {}).get("exitCode") == 0
                    if not container.get("ready") and not finished:
                        name = pod["metadata"]["name"]
                        parts.append(f"-- log of {name}/{container['name']}\n{self.logs(name, container['name'])}")
        except KubectlError as error:
            parts.append(str(error))
        return "\n".join(parts)

    def pod_ip(self, selector: str) -> str:
        """The address of the one running pod that a selector matches.

        Raises:
            NotTrueInTimeError: if it is not exactly one.
        """
        return str(self.pod(selector)["status"]["podIP"])

    def pod(self, selector: str) -> Object:
        """The one pod that a selector matches and that is not being deleted.

        Raises:
            NotTrueInTimeError: if it is not exactly one.
        """
        found = [pod for pod in self.list("pods", selector) if "deletionTimestamp" not in pod["metadata"]]
        if len(found) != 1:
            raise NotTrueInTimeError(f"expected one pod with {selector} in {self.namespace}, found {len(found)}")
        return found[0]


def _hopeless(pod: Object) -> str:
    """Why a pod will not start without a change; empty when it may still."""
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {}).get("reason", "")
        again = waiting == "CrashLoopBackOff" and container.get("restartCount", 0) >= 3
        if again or waiting in {"ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError"}:
            return f"{pod['metadata']['name']}/{container['name']} is in {waiting}"
    return ""
