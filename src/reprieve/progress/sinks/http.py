"""A small HTTP server for progress: for the operator, for Prometheus, for a person with curl.

    /, /progress        JSON
    /trainingProgress   JSON in the form of the progress file, and what is in the checkpoint folder
    /metrics            Prometheus' text; JSON for a client that accepts JSON or names no type, as Kubeflow's
                        controllers do
    /healthz            ok

It is read-only and responds with the last update: no request waits for training or delays it.
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
_MAX_CLIENTS = 16
"""At the same time. A slow one occupies a thread for `_TIMEOUT_S`; connections beyond the limit are closed."""
_TIMEOUT_S = 2.0

_listening: weakref.WeakSet[_Server] = weakref.WeakSet()


class HttpSink:
    """Serves progress from the first `update` on. If the port is in use, every update tries again."""

    every_s = 1.0

    def __init__(self, port: int = PORT, addresses: Sequence[str] = (LOOPBACK,)) -> None:
        """`port`: 0 takes a free port and logs it."""
        self._requested_port = port
        self._addresses = list(addresses)
        self._servers: list[_Server] = []
        self._latest: list[Progress | None] = [None]
        """Shared with the servers."""

    @property
    def name(self) -> str:
        return f"the HTTP server on port {self.port or self._requested_port}"

    @property
    def port(self) -> int | None:
        """The actual port; None: it does not listen yet."""
        return self._servers[0].server_address[1] if self._servers else None

    def update(self, progress: Progress) -> None:
        self._latest[0] = progress
        if not self._servers:
            self._listen()

    def close(self, progress: Progress) -> None:
        self._latest[0] = progress
        for server in self._servers:
            server.stop()

    def _listen(self) -> None:
        port = self._requested_port
        servers: list[_Server] = []
        try:
            for address in self._addresses:
                servers.append(_Server(address, port, self._latest))
                port = servers[0].server_address[1]
        except OSError as error:
            for server in servers:
                server.server_close()
            if error.errno == errno.EADDRINUSE:
                message = f"port {port} is in use: set REPRIEVE_METRICS_PORT to another port, to 0 (any) or to off"
                raise OSError(error.errno, message) from None
            raise
        for server in servers:
            server.start()
        self._servers = servers
        urls = ", ".join(
            f"http://{f'[{address}]' if ':' in address else address}:{port}" for address in self._addresses
        )
        log.info("progress is served at %s", urls)


class _Server(ThreadingTCPServer):
    # Not http.server.HTTPServer, which looks up the name of this machine at a name server.
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, port: int, latest: list[Progress | None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.latest = latest
        self._free = threading.Semaphore(_MAX_CLIENTS)
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
        self._thread.join(_TIMEOUT_S)
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
        """Ignore clients that disconnect or are too slow."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_S
    server_version = "reprieve"
    sys_version = ""

    def do_GET(self) -> None:
        progress = self.server.latest[0]
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._respond(b"ok\n", "text/plain; charset=utf-8")
        elif path not in ("/", "/progress", "/trainingProgress", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND)
        elif progress is None:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
        elif path == "/metrics" and not self._wants_json():
            self._respond(prometheus.render(progress), prometheus.CONTENT_TYPE)
        elif path == "/trainingProgress":
            self._respond(progress_json.dumps(progress_json.for_training_progress(progress)), "application/json")
        else:
            self._respond(progress_json.dumps(progress_json.for_http(progress)), "application/json")

    do_HEAD = do_GET

    def _wants_json(self) -> bool:
        """The Go client of Kubeflow's controllers sends no Accept header. Prometheus, curl and browsers do."""
        return "application/json" in self.headers.get("Accept", "application/json")

    def _respond(self, data: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Vary", "Accept")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@cache
def _close_in_children() -> None:
    """Close the sockets in forks: a DataLoader worker has no thread to respond, and must not hold the port."""

    def close() -> None:
        for server in list(_listening):
            with contextlib.suppress(OSError):
                server.socket.close()

    os.register_at_fork(after_in_child=close)
