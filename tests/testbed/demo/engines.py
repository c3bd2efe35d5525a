"""The demo's engines: which there are, their Deployments, and asking them."""

from dataclasses import dataclass
from typing import Any

from testbed.completions import Server
from testbed.demo.manifests import render
from testbed.demo.place import MODEL, Place
from testbed.demo.settings import Settings
from testbed.engine import server_arguments

PORT = 8000


@dataclass(frozen=True)
class DemoEngine:
    """One vLLM Deployment of the demo.

    Attributes:
        name: of the Deployment.
        tp: tensor-parallel size.
        layout: physical cache layout, by vLLM's short name.
        role: role in the pool; empty for a reference, which knows nothing of the pool.
    """

    name: str
    tp: int
    layout: str
    role: str = ""

    @property
    def selector(self) -> str:
        """Labels of its pods."""
        return f"app={self.name}"


def members(settings: Settings) -> tuple[DemoEngine, DemoEngine]:
    """The prefill engine with a token-major cache and the decode engine with a head-major one."""
    return (
        DemoEngine("prefill", settings.prefill_tp, "NHD", "prefill"),
        DemoEngine("decode", settings.decode_tp, "HND", "decode"),
    )


def references(settings: Settings) -> tuple[DemoEngine, ...]:
    """One engine without the pool for each size that runs."""
    sizes = sorted({settings.prefill_tp, settings.decode_tp}, reverse=True)
    return tuple(DemoEngine(f"reference-tp{size}", size, "HND") for size in sizes)


def deployment(engine: DemoEngine, place: Place, settings: Settings) -> dict[str, Any]:
    """The engine's Deployment for this cluster."""
    annotations = {"kvshare.dev/pool": "demo", "kvshare.dev/role": engine.role} if engine.role else {}
    environment = {**place.engine_environment(engine.tp), "VLLM_KV_CACHE_LAYOUT": engine.layout}
    (made,) = render(
        "engine",
        name=engine.name,
        annotations=annotations,
        image=place.engine_image,
        pull_policy=place.pull_policy,
        model=MODEL,
        arguments=server_arguments(tp=engine.tp),
        environment=[{"name": name, "value": value} for name, value in environment.items()],
    )
    pod = made["spec"]["template"]["spec"]
    if settings.gpu_resource:
        pod["containers"][0]["resources"]["limits"] = {settings.gpu_resource: engine.tp}
    place.complete_pod(pod)
    return made


def server(engine: DemoEngine, place: Place, namespace: str) -> Server:
    """The server in the engine's present pod."""
    return Server(place.url(place.kubectl.within(namespace), engine.selector, PORT))
