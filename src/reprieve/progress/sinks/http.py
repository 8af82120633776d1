"""A small HTTP server that says how far the run is: to the operator, to Prometheus, to a person with curl.

    /, /progress   JSON
    /metrics       Prometheus' text; JSON for a client that names no type or names JSON, as Kubeflow's controllers do
    /healthz       ok

Read-only. A request is answered from what was told last: no request waits for training, or makes it wait.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from reprieve.progress.formats import progress_json, prometheus
from reprieve.progress.pod import LOOPBACK
from reprieve.progress.snapshot import Progress

log = logging.getLogger("reprieve")

PORT = 28080
_CLIENTS = 16
"""At once. One that is slow holds a thread of ours for `_PATIENCE_S`; more are hung up on."""
_PATIENCE_S = 2.0

_listening: weakref.WeakSet[_Server] = weakref.WeakSet()


class HttpSink:
    """Listens from the first `update` on. A port that somebody else has is tried again with every update."""

    every_s = 1.0

    def __init__(self, port: int = PORT, addresses: Sequence[str] = (LOOPBACK,)) -> None:
        """`port`: 0 takes a free one, and logs it."""
        self._asked = port
        self._addresses = list(addresses)
        self._servers: list[_Server] = []
        self._told: list[Progress | None] = [None]
        """Shared with the servers."""

    @property
    def name(self) -> str:
        return f"the HTTP server on port {self.port or self._asked}"

    @property
    def port(self) -> int | None:
        """None: it does not listen yet."""
        return self._servers[0].server_address[1] if self._servers else None

    def update(self, progress: Progress) -> None:
        self._told[0] = progress
        if not self._servers:
            self._listen()

    def close(self, progress: Progress) -> None:
        self._told[0] = progress
        for one in self._servers:
            one.stop()

    def _listen(self) -> None:
        port = self._asked
        servers: list[_Server] = []
        try:
            for address in self._addresses:
                servers.append(_Server(address, port, self._told))
                port = servers[0].server_address[1]
        except OSError as error:
            for one in servers:
                one.server_close()
            if error.errno == errno.EADDRINUSE:
                message = f"port {port} is in use: REPRIEVE_METRICS_PORT takes another, 0 a free one, off none"
                raise OSError(error.errno, message) from None
            raise
        for one in servers:
            one.start()
        self._servers = servers
        where = ", ".join(f"http://{f'[{one}]' if ':' in one else one}:{port}" for one in self._addresses)
        log.info("progress is told at %s", where)


class _Server(ThreadingTCPServer):
    # Not http.server.HTTPServer: that asks a name server for the name of this machine.
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, port: int, told: list[Progress | None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.told = told
        self._free = threading.Semaphore(_CLIENTS)
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="reprieve http", daemon=True)
        super().__init__((address, port), _Handler)
        _listening.add(self)
        _close_in_children()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._thread.join(_PATIENCE_S)
        self.server_close()

    def _serve(self) -> None:
        """Not serve_forever, which looks twice a second whether it should end."""
        while not self._stopped:
            self.handle_request()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up, or was too slow."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE_S
    server_version = "reprieve"
    sys_version = ""

    def do_GET(self) -> None:
        progress = self.server.told[0]
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(b"ok\n", "text/plain; charset=utf-8")
        elif path not in ("/", "/progress", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND)
        elif progress is None:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
        elif path == "/metrics" and not self._wants_json():
            self._answer(prometheus.render(progress), prometheus.CONTENT_TYPE)
        else:
            self._answer(progress_json.dumps(progress_json.for_http(progress)), "application/json")

    do_HEAD = do_GET

    def _wants_json(self) -> bool:
        """Go's client, which polls for the controllers, sends no Accept. Prometheus, curl and browsers do."""
        return "application/json" in self.headers.get("Accept", "application/json")

    def _answer(self, data: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Vary", "Accept")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: who asks how often is no news."""


@cache
def _close_in_children() -> None:
    """A forked DataLoader worker has no thread that would answer, and must not keep the port."""

    def close() -> None:
        for one in list(_listening):
            with contextlib.suppress(OSError):
                one.socket.close()

    os.register_at_fork(after_in_child=close)
