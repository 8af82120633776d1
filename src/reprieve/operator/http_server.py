"""An HTTP or HTTPS server as one part of the operator: it runs until `stop`, and finishes what was requested."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from ssl import SSLContext

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from reprieve.errors import ConfigError

KEEP_ALIVE_S = 120
"""The API server closes an idle connection after 90 s. If this side were first, it could send a request into it."""
FINISH_S = 10
"""How long requests may take to finish when the server stops: twice the API server's limit."""


class HttpServer:
    """Listens from the start. ConfigError: the port cannot be used; `option` names what sets it.

    address: host and port; an empty host means all addresses. ssl: plain HTTP without it.
    """

    def __init__(
        self, routes: Sequence[Route], address: tuple[str, int], *, option: str, ssl: SSLContext | None = None
    ) -> None:
        try:
            self._socket = _listen(*address)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"cannot serve on port {address[1]}: {reason}; choose another {option}") from error
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FINISH_S,
        )
        config.load()
        config.ssl = ssl
        self._server = _Server(config)

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    async def run(self) -> None:
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Finish the requests that are there, then end `run`."""
        self._server.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """Bind the port of all addresses, IPv4 and IPv6, or of one."""
    if not host and socket.has_dualstack_ipv6():
        listening = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listening = socket.create_server((host, port))
    # Connections inherit it. asyncio sets it only on sockets that it has made: an answer of two packets took 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the operator decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
