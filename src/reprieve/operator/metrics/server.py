"""Plain HTTP for Prometheus and for probes, on a port of its own: nothing that it answers is a secret.

GET /metrics   what families.py makes
GET /healthz   200 while the process answers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from reprieve.operator.http_server import HttpServer
from reprieve.progress.formats.prometheus import CONTENT_TYPE


def metrics_server(render: Callable[[], Iterable[str]], address: tuple[str, int]) -> HttpServer:
    """Return the server. `render`: the lines of all metrics, as they are now."""

    async def metrics(_: Request) -> Response:
        return Response("\n".join([*render(), ""]), media_type=CONTENT_TYPE)

    async def is_healthy(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    routes = [Route("/metrics", metrics), Route("/healthz", is_healthy)]
    return HttpServer(routes, address, option="--metrics-port")
