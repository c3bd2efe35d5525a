"""The cluster under the demo: where images, vLLM and the model come from, and how its pods are reached.

`OwnCluster` is the one-node cluster of this machine; `GivenCluster` is whatever KUBECONFIG leads to.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from testbed import places, tiny_llama
from testbed.cluster import Cluster
from testbed.engine import cpu_environment
from testbed.kubectl import Kubectl
from testbed.ports import free_ports, is_open
from testbed.prepare import images
from testbed.prepare.go_programs import program
from testbed.process import Process
from testbed.tiny_model import tiny_model

MODEL = "/models/tiny-llama"
ENVIRONMENT = "/opt/vllm-env"


class Place(Protocol):
    """What the demo needs to know about its cluster."""

    kubectl: Kubectl
    operator_image: str
    connector_image: str
    engine_image: str
    pull_policy: str

    def complete_pod(self, pod: dict[str, Any]) -> None:
        """Add to a pod spec, in place, what brings vLLM's packages and the model on this cluster."""

    def engine_environment(self, tp: int) -> dict[str, str]:
        """Variables of an engine that depend on the machine, not on the demo."""

    def extra_objects(self) -> list[dict[str, Any]]:
        """Objects that `complete_pod` refers to."""

    def url(self, kubectl: Kubectl, selector: str, port: int) -> str:
        """Where the port of the one pod that the selector matches is reached from here."""


class OwnCluster:
    """The one-node cluster: nothing is pulled, vLLM's packages and the model are mounted from this machine."""

    pull_policy = "Never"

    def __init__(self, cluster: Cluster) -> None:
        self.kubectl = cluster.kubectl
        self.operator_image = images.OPERATOR.reference
        self.connector_image = images.CONNECTOR.reference
        self.engine_image = images.ENGINE.reference
        self._mounts = {ENVIRONMENT: places.site_packages(), MODEL: tiny_model()}

    @staticmethod
    def archives() -> list[Path]:
        """The images that the node must have."""
        return [wanted.archive for wanted in (*images.PRODUCT_IMAGES, images.ENGINE)]

    def complete_pod(self, pod: dict[str, Any]) -> None:
        """Mount packages and model, read-only."""
        for number, (target, source) in enumerate(self._mounts.items()):
            name = f"host-{number}"
            path = {"path": str(source.resolve()), "type": "Directory"}
            pod.setdefault("volumes", []).append({"name": name, "hostPath": path})
            mount = {"name": name, "mountPath": target, "readOnly": True}
            pod["containers"][0].setdefault("volumeMounts", []).append(mount)

    def engine_environment(self, tp: int) -> dict[str, str]:
        """How ranks share the cores, and the attention that takes any layout."""
        return {"REFERENCE_ATTENTION": "1", **cpu_environment(tp)}

    def extra_objects(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def url(self, kubectl: Kubectl, selector: str, port: int) -> str:
        """The pod's own address: this machine is the node."""
        return f"http://{kubectl.pod_ip(selector)}:{port}"


class GivenCluster:
    """Somebody's cluster: images come from registries; every engine pod makes the model before it starts."""

    pull_policy = "IfNotPresent"

    def __init__(self, kubeconfig: Path, *, registry: str, version: str, vllm_image: str, forwards: "Forwards") -> None:
        self.kubectl = Kubectl(kubeconfig)
        self.operator_image = f"{registry.rstrip('/')}/kvshare-operator:{version}"
        self.connector_image = f"{registry.rstrip('/')}/kvshare-connector:{version}"
        self.engine_image = vllm_image
        self._forwards = forwards

    def complete_pod(self, pod: dict[str, Any]) -> None:
        """Run the model's recipe in an init container of the same image."""
        container = pod["containers"][0]
        volumes = [
            {"name": "recipe", "configMap": {"name": "tiny-llama-recipe"}},
            {"name": "model", "emptyDir": {}},
        ]
        pod.setdefault("volumes", []).extend(volumes)
        model = {"name": "model", "mountPath": MODEL.rsplit("/", 1)[0]}
        container.setdefault("volumeMounts", []).append({**model, "readOnly": True})
        scratch = {"name": "scratch", "mountPath": "/tmp"}
        pod["initContainers"] = [
            {
                "name": "make-model",
                "image": container["image"],
                "imagePullPolicy": container["imagePullPolicy"],
                "command": ["python3", "/recipe/tiny_llama.py", MODEL],
                "env": [{"name": "HOME", "value": "/tmp"}],
                "securityContext": container.get("securityContext", {}),
                "volumeMounts": [model, scratch, {"name": "recipe", "mountPath": "/recipe"}],
            }
        ]

    def engine_environment(self, tp: int) -> dict[str, str]:
        """A home folder that can be written; everything else is the image's business."""
        return {"HOME": "/tmp", "HF_HUB_OFFLINE": "1"}

    def extra_objects(self) -> list[dict[str, Any]]:
        """The model's recipe."""
        text = Path(tiny_llama.__file__).read_text()
        metadata = {"name": "tiny-llama-recipe"}
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": metadata,
                "data": {"tiny_llama.py": text},
            }
        ]

    def url(self, kubectl: Kubectl, selector: str, port: int) -> str:
        """A local port that `kubectl port-forward` leads to the pod."""
        return self._forwards.url(kubectl, str(kubectl.pod(selector)["metadata"]["name"]), port)


class Forwards:
    """Running port-forwards, one for each pod and port; they end with `forwards()`."""

    def __init__(self, stack: ExitStack, logs: Path) -> None:
        self._stack = stack
        self._logs = logs
        self._urls: dict[tuple[str, int], str] = {}

    def url(self, kubectl: Kubectl, pod: str, port: int) -> str:
        """The local address that leads to a pod's port."""
        if (pod, port) not in self._urls:
            (local,) = free_ports(1)
            process = Process(
                f"port-forward to {pod}",
                [
                    *(program("kubectl"), "--kubeconfig", kubectl.kubeconfig),
                    *("--namespace", kubectl.namespace, "port-forward", f"pod/{pod}", f"{local}:{port}"),
                ],
                log=self._logs / f"port-forward-{pod}-{port}.log",
            )
            self._stack.callback(process.stop)
            process.wait_until(lambda: is_open(local), seconds=120, what="listen")
            self._urls[pod, port] = f"http://127.0.0.1:{local}"
        return self._urls[pod, port]


@contextmanager
def forwards(logs: Path) -> Iterator[Forwards]:
    """Port-forwards that end with the block."""
    with ExitStack() as stack:
        yield Forwards(stack, logs)
