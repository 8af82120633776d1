"""The webhook's server: HTTPS around the pure functions of `admission.py`.

    POST /admission   an AdmissionReview; the runtime that the job refers to is read from the API server
    GET  /healthz     200 while the process answers
    GET  /readyz      200 while the API server may call this replica, else 503 and why not

A body that is no AdmissionReview is a 400 with the reason. Of reviews, only refusals are logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from reprieve.errors import ApiUnreachable, KubernetesError, ObjectNotFound
from reprieve.kubernetes.api import KubernetesApi, within
from reprieve.kubernetes.kinds import CLUSTER_TRAINING_RUNTIME, TRAINING_RUNTIME, Object
from reprieve.kubernetes.runtime import RuntimeReference
from reprieve.operator import admission
from reprieve.operator.http_server import HttpServer
from reprieve.operator.log import fields
from reprieve.operator.serving_context import ServingContext

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 3 << 20
"""The API server's own limit for a request."""
RUNTIME_TIMEOUT_S = 2.0
"""To read a runtime. The API server gives the whole call 5 s (deploy/helm/reprieve/templates/webhook.yaml)."""

ReadRuntime = Callable[[RuntimeReference], Awaitable[Object | None]]


class BadReview(Exception):
    """The body of a request is no AdmissionReview. The message says why."""


class WebhookServer:
    """Serves until `stop`. `drain` makes /readyz fail and closes connections, but still answers.

    missing: returns why the API server may not call this replica yet, or nothing.
    """

    def __init__(
        self,
        read_runtime: ReadRuntime,
        serving: ServingContext,
        *,
        missing: Callable[[], str],
        address: tuple[str, int],
    ) -> None:
        self._read_runtime = read_runtime
        self._missing = missing
        self._is_draining = False
        routes = [
            Route("/admission", self._admit, methods=["POST"]),
            Route("/healthz", self._is_healthy),
            Route("/readyz", self._is_ready),
        ]
        self._server = HttpServer(routes, address, option="--port", ssl=serving.context)

    @property
    def port(self) -> int:
        return self._server.port

    async def run(self) -> None:
        await self._server.run()

    def drain(self) -> None:
        self._is_draining = True

    def stop(self) -> None:
        """Finish the requests that are there, then end `run`."""
        self._server.stop()

    async def _is_healthy(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _is_ready(self, _: Request) -> Response:
        reason = "stopping" if self._is_draining else self._missing()
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)

    async def _admit(self, request: Request) -> Response:
        try:
            review = parse_review(await _body(request))
        except BadReview as error:
            log.warning("a request is no AdmissionReview: %s", error)
            response: Response = PlainTextResponse(f"{error}\n", status_code=400)
        else:
            answer = await self._answer(review)
            if not answer["response"]["allowed"]:
                log_refusal(review, answer)
            response = JSONResponse(answer)
        if self._is_draining:
            # The API server opens its next connection to another replica.
            response.headers["connection"] = "close"
        return response

    async def _answer(self, review: Object) -> Object:
        reference = admission.runtime_of(review)
        try:
            runtime = None if reference is None else await self._read_runtime(reference)
        except KubernetesError as error:
            # Without its runtime, the job could run unprotected, and nobody would notice.
            return refuse(review, f"Reprieve could not read the runtime of this job: {error}; try again", code=503)
        return admission.respond(review, runtime)


def runtime_reader(api: KubernetesApi, *, timeout_s: float = RUNTIME_TIMEOUT_S) -> ReadRuntime:
    """Return a function that reads runtimes: None if one does not exist, a KubernetesError if it cannot be read."""

    async def read(reference: RuntimeReference) -> Object | None:
        kind = TRAINING_RUNTIME if reference.namespace else CLUSTER_TRAINING_RUNTIME
        try:
            return await within(timeout_s, api.get(kind, reference.name, namespace=reference.namespace or None))
        except ObjectNotFound:
            return None
        except asyncio.TimeoutError:
            raise ApiUnreachable(
                f"cannot get {reference.kind} {reference.name}: no answer in {timeout_s:g} s"
            ) from None

    return read


def parse_review(body: bytes) -> Object:
    """Return the AdmissionReview in a body, or raise BadReview."""
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReview(f"not JSON: {error}") from error
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview":
        raise BadReview("not an AdmissionReview")
    request = review.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise BadReview("an AdmissionReview without request.uid")
    return review


def refuse(review: Object, message: str, *, code: int) -> Object:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {
            "uid": review["request"]["uid"],
            "allowed": False,
            "status": {"code": code, "message": message},
        },
    }


def log_refusal(review: Object, answer: Object) -> None:
    request, status = review["request"], answer["response"].get("status", {})
    log.warning(
        "refused: %s",
        status.get("message", "without a reason"),
        extra=fields(
            operation=request.get("operation", ""),
            namespace=request.get("namespace", ""),
            name=request.get("name") or "",
            uid=request["uid"],
        ),
    )


async def _body(request: Request) -> bytes:
    """Read the body, as far as the limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadReview(f"more than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)
