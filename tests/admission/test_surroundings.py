"""What around a pod can hurt an engine: Services with names that become vLLM's variables, and small memory limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvshare_operator.core.injection.inject import Injected, inject
from kvshare_operator.core.injection.surroundings import COLLIDING_SERVICES
from kvshare_operator.core.pool.view import view
from kvshare_operator.edges import service_names
from kvshare_operator.edges.cluster_api import ApiError
from kvshare_operator.edges.memory_api import MemoryClusterApi
from kvshare_operator.edges.service_names import ServiceNames
from pods import SETTINGS, Json, injected, pod_p0, pool_p1, refused


def warnings(pod: Json, *services: str) -> list[str]:
    """Warnings about Services, of an injection beside these Services."""
    outcome = inject(pod, view(pool_p1(), SETTINGS.connector_image), SETTINGS, services)
    assert isinstance(outcome, Injected), outcome.sentence()
    return [text for text in outcome.warnings if text.startswith("Service ")]


@pytest.mark.parametrize("service", COLLIDING_SERVICES)
def test_service_whose_link_variable_the_engine_reads_is_warned_about(service: str) -> None:
    """B36: the pod is injected all the same; the warning names Service, variable and remedy."""
    (text,) = warnings(pod_p0(), "mooncake-master", "llama", service)
    assert service in text
    assert COLLIDING_SERVICES[service] in text
    assert "enableServiceLinks: false" in text
    assert COLLIDING_SERVICES[service] == f"{service.upper().replace('-', '_')}_PORT"


def test_pod_that_does_not_meet_the_variable_is_not_warned() -> None:
    """B36: service links are off, or the container sets the variable itself."""
    pod = pod_p0()
    pod["spec"]["enableServiceLinks"] = False
    assert warnings(pod, "vllm") == []
    assert warnings(pod_p0(env=[{"name": "VLLM_PORT", "value": "5000"}]), "vllm") == []


def test_services_are_asked_by_name_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """B36: no list of Services; an API server that refuses or hangs costs no more than the warning."""
    path = "/api/v1/namespaces/ns-a/services/vllm"
    monkeypatch.setattr(service_names, "_PATIENCE_SECONDS", 50.0)  # who answers at once is never given up

    async def ask() -> None:
        api = MemoryClusterApi({path: {"kind": "Service"}})
        names = ServiceNames(api)
        assert await names.colliding("ns-a") == {"vllm"}
        assert await names.colliding("ns-a") == {"vllm"}
        assert [call for call in api.calls if call[1] == path] == [("GET", path)]
        assert len(api.calls) == len(COLLIDING_SERVICES)
        api.faults[path] = ApiError(403, "forbidden")
        assert await ServiceNames(api).colliding("ns-a") == frozenset()

        class Hanging(MemoryClusterApi):
            async def call(self, *_: Any, **__: Any) -> Json:
                await asyncio.Event().wait()
                return {}

        monkeypatch.setattr(service_names, "_PATIENCE_SECONDS", 0.2)
        assert await ServiceNames(Hanging()).colliding("ns-a") == frozenset()

    asyncio.run(ask())


def limited(memory: str | None, gpus: int = 2, args: list[str] | None = None) -> Json:
    """The base pod with another memory limit; None for no limit."""
    limits = {"nvidia.com/gpu": str(gpus)} | ({"memory": memory} if memory else {})
    return pod_p0(args=args or ["-tp", "2"], resources={"limits": limits})


def test_memory_limit_that_does_not_hold_the_staging_memory_is_refused() -> None:
    """5.5: (staging + client buffer) for each rank; an engine that would be killed is better left alone."""
    answer = refused(limited("512Mi"))
    assert answer.code == "MemoryTooSmall"
    assert "544 MiB" in answer.message  # 2 ranks of 256 + 16
    assert "512Mi" in answer.message


def test_memory_limit_that_is_mostly_taken_is_warned_about() -> None:
    """Injected, with the numbers; a large limit, none, or one that cannot be read says nothing."""
    (text,) = [one for one in injected(limited("1Gi")).warnings if "memory limit" in one]
    assert "544 MiB" in text
    for memory in ("16Gi", None, "lots"):
        assert not [one for one in injected(limited(memory)).warnings if "memory limit" in one]
    pool = pool_p1(connector={"stagingMemoryPerRank": "32Mi"})
    assert not [one for one in injected(limited("1Gi"), pool).warnings if "memory limit" in one]


def test_no_more_ranks_are_counted_than_the_pod_has_gpus() -> None:
    """A group's other pods have their own memory; without GPUs every rank runs here."""
    pool = pool_p1(prefill={"tensorParallelSizes": [8, 2]})
    assert refused(limited("1Gi", 0, ["-tp", "8"]), pool).code == "MemoryTooSmall"
    assert injected(limited("1Gi", 2, ["-tp", "8"]), pool)
