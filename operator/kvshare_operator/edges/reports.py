"""The report endpoint: a member's POST becomes two conditions of its pod.

Why this exists: `kubectl wait --for=condition=kvshare.dev/Shared` must work, and the controller must see what
members found without asking them. The token proves which pod speaks; the body is read by
``kvshare_layout.reports`` and never trusted. Only `pods/status` is written, and only the pod's own.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import logging
from typing import Any

from aiohttp import web

from kvshare_layout import reports
from kvshare_layout.errors import LayoutError
from kvshare_operator.api import names
from kvshare_operator.core.pool.conditions import report_condition, reports_of, shared_condition
from kvshare_operator.edges import metrics
from kvshare_operator.edges.cluster_api import STRATEGIC, ApiError, ClusterApi

log = logging.getLogger("kvshare.reports")
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_ATTEMPTS = 3
#: Times that a verdict is written while other engines of the pod report too.
_ROUNDS = 8


class Denied(Exception):  # noqa: N818 - it is an answer, not a failure
    """The caller did not prove which pod it is."""


class ReportEndpoint:
    """`POST /v1/report`."""

    def __init__(self, api: ClusterApi) -> None:
        self.api = api

    def app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=reports.MAX_BYTES)
        app.add_routes([web.post("/v1/report", self._post)])
        return app

    async def _post(self, request: web.Request) -> web.Response:
        result, response = await self._answer(request)
        metrics.REPORTS.labels(result).inc()
        return response

    async def _answer(self, request: web.Request) -> tuple[str, web.Response]:
        try:
            namespace, name, uid = await self._pod(request.headers.get("Authorization", ""))
            report = reports.from_json(await request.read())
            await self._write(namespace, name, uid, report)
        except Denied as error:
            return "denied", _text(401, str(error))
        except LayoutError as error:
            return "malformed", _text(400, str(error))
        except ApiError as error:
            log.warning("a report could not be stored: %s", error)
            return "failed", _text(404 if error.status == 404 else 503, "the report could not be stored; try again")
        log.info("pod %s/%s reports %s (%s)", namespace, name, report.verdict, report.reason)
        return "stored", _text(200, "stored")

    async def _pod(self, authorization: str) -> tuple[str, str, str]:
        """Return (namespace, pod name, pod UID) that the token was issued for. Raises Denied."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Denied(f"a service-account token with the audience {names.TOKEN_AUDIENCE} is expected")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [names.TOKEN_AUDIENCE]},
        }
        found = await self.api.call("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body=body)
        status: dict[str, Any] = found.get("status") or {}
        if not status.get("authenticated") or names.TOKEN_AUDIENCE not in (status.get("audiences") or []):
            raise Denied("the token is not valid for this endpoint")
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        parts = str(user.get("username", "")).split(":")
        name, uid = (extra.get(_POD_NAME) or [""])[0], (extra.get(_POD_UID) or [""])[0]
        if parts[:2] != ["system", "serviceaccount"] or len(parts) != 4 or not name or not uid:
            raise Denied("the token does not belong to a pod")
        return parts[2], name, uid

    async def _write(self, namespace: str, name: str, uid: str, report: reports.MemberReport) -> None:
        """Store the report, then the worst verdict of all engines that the answer shows.

        Engines of one pod may report at the same time, to two replicas. Each writes its own report first, so whoever
        writes the verdict last has seen all of them; the others see from the answer that they have to write again.
        """
        now = datetime.datetime.now(datetime.UTC)
        pod = await self._patch(namespace, name, uid, report_condition(report, now))
        for _ in range(_ROUNDS):
            shared = shared_condition(reports_of(pod.get("status") or {}) or [report], now)
            if shared is None or _says(pod, shared):
                return
            pod = await self._patch(namespace, name, uid, shared)

    async def _patch(self, namespace: str, name: str, uid: str, condition: dict[str, Any]) -> dict[str, Any]:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        # With the UID a successor of the same name refuses the patch.
        body = {"metadata": {"uid": uid}, "status": {"conditions": [condition]}}
        for attempt in itertools.count(1):
            try:
                return await self.api.call(
                    "PATCH", path, body=body, content_type=STRATEGIC, query={"fieldManager": names.WEBHOOK_MANAGER}
                )
            except ApiError as error:
                if not error.retry or attempt == _ATTEMPTS:
                    raise
                await asyncio.sleep(0.2 * attempt)
        raise AssertionError("the loop above ends by itself")


def _says(pod: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a pod has a condition, whenever it got it."""
    told = ("type", "status", "reason", "message")
    present = (pod.get("status") or {}).get("conditions") or []
    return any(all(one.get(key) == wanted[key] for key in told) for one in present)


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")
