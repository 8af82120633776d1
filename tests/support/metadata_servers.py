"""Metadata servers of the clouds, on loopback: they speak as documented, or are odd. And who asks them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from reprieve.preemption.notices import Notice, NoticePoller

Reply = tuple[int, dict[str, str], str]
Oddity = Callable[["Handler"], None]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rig: LocalServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, url.path, dict(parse_qsl(url.query)), headers)
        self.rig.asked(request)
        if (odd := self.rig.odd) is not None:
            odd(self)
            return
        status, more, body = self.rig.reply(request)
        self.send_response(status)
        for name, value in {**more, "Content-Length": str(len(body.encode()))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hung up."""


class LocalServer:
    """Serves while it is a context manager."""

    def __init__(self) -> None:
        self.odd: Oddity | None = None
        """What it does instead of answering."""
        self.requests: list[Request] = []
        self.stopped = threading.Event()
        self._came = threading.Condition()
        handler = type("OwnHandler", (Handler,), {"rig": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def reply(self, request: Request) -> Reply:
        return 404, {}, ""

    def asked(self, request: Request) -> None:
        with self._came:
            self.requests.append(request)
            self._came.notify_all()

    def wait_for_requests(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.requests) >= count, timeout=10)

    def __enter__(self) -> LocalServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


class AwsServer(LocalServer):
    """IMDSv2. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html"""

    def __init__(self) -> None:
        super().__init__()
        self.action: object = None
        self.rebalance: object = None
        self.tokens: list[str] = []
        self.valid = 0
        """How many of the first tokens are no longer valid."""

    def expire_tokens(self) -> None:
        self.valid = len(self.tokens)

    def notify(self) -> None:
        self.action = {"action": "terminate", "time": "2030-09-18T08:22:00Z"}

    def reply(self, request: Request) -> Reply:
        if "x-forwarded-for" in request.headers:
            return 403, {}, ""
        if request.path == "/latest/api/token":
            ttl = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if request.method != "PUT" or not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return 400, {}, ""
            self.tokens.append(f"AQAAAN-{len(self.tokens)}==")
            return 200, {"X-aws-ec2-metadata-token-ttl-seconds": ttl}, self.tokens[-1]
        if request.headers.get("x-aws-ec2-metadata-token") not in self.tokens[self.valid :]:
            return 401, {}, "<title>401 - Unauthorized</title>"
        found = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(request.path)
        if found is None:
            return 404, {}, "<title>404 - Not Found</title>"
        return 200, {"Content-Type": "application/json"}, found if isinstance(found, str) else json.dumps(found)


class GcpServer(LocalServer):
    """https://cloud.google.com/compute/docs/metadata/querying-metadata"""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self._version = 0
        self.flavor = {"Metadata-Flavor": "Google"}

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._version += 1
            self._changed.notify_all()

    def notify(self) -> None:
        self.set("preempted", "TRUE")

    def _etag(self, key: str) -> str:
        return f"{hash((key, self._values[key])) & 0xFFFFFFFFFFFF:016x}"

    def reply(self, request: Request) -> Reply:
        if request.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in request.headers:
            return 403, {}, ""
        prefix, _, key = request.path.rpartition("/")
        if prefix != "/computeMetadata/v1/instance" or key not in self._values:
            return 404, {}, ""
        with self._changed:
            if request.query.get("wait_for_change") == "true":
                known = request.query.get("last_etag", self._etag(key))
                limit = float(request.query.get("timeout_sec", "3600"))
                self._changed.wait_for(lambda: self._etag(key) != known or self.stopped.is_set(), timeout=limit)
            return 200, {**self.flavor, "ETag": self._etag(key), "Content-Type": "application/text"}, self._values[key]

    def __exit__(self, *args: object) -> None:
        self.stopped.set()
        with self._changed:
            self._changed.notify_all()
        super().__exit__(*args)


class AzureServer(LocalServer):
    """https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events"""

    def __init__(self) -> None:
        super().__init__()
        self.name = "WestNO_0"
        self.events: list[Any] = []
        self.document = ""
        """Instead of one with the events."""
        self.first_delay = 0.0

    def schedule(self, kind: str, not_before: Any, *, machines: tuple[str, ...] = ("WestNO_0",), **more: Any) -> None:
        self.events.append(
            {
                "EventId": f"C7061BAC-AFDC-4513-B24B-{len(self.events):012}",
                "EventStatus": "Started" if not_before == "" else "Scheduled",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(machines),
                "NotBefore": not_before if isinstance(not_before, str) else format_datetime(not_before, usegmt=True),
                "Description": "Host server is undergoing maintenance.",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
                **more,
            }
        )

    def notify(self) -> None:
        self.schedule("Preempt", "")

    def reply(self, request: Request) -> Reply:
        if request.headers.get("metadata") != "true" or "x-forwarded-for" in request.headers:
            return 400, {}, '{"error": "Bad request. Required metadata header not specified"}'
        if "api-version" not in request.query or request.method != "GET":
            return 400, {}, '{"error": "Bad request. api-version is invalid or was not specified in the request."}'
        if request.path == "/metadata/instance/compute/name" and request.query.get("format") == "text":
            return 200, {"Content-Type": "text/plain"}, self.name
        if request.path != "/metadata/scheduledevents" or request.query["api-version"] != "2020-07-01":
            return 404, {}, ""
        delay, self.first_delay = self.first_delay, 0.0
        self.stopped.wait(delay)
        return 200, {}, self.document or json.dumps({"DocumentIncarnation": 1, "Events": self.events})


# What a server may do instead.


def status(code: int, **headers: str) -> Oddity:
    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in {**headers, "Content-Length": "0"}.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def says(text: str, length: int | None = None) -> Oddity:
    """With status 200, and Google's header, so that only the text is odd. `length`: what it claims to be."""

    def answer(handler: Handler) -> None:
        _begin(handler, **{"Content-Length": str(len(text.encode()) if length is None else length)})
        handler.wfile.write(text.encode())
        handler.close_connection = True

    return answer


def hang(handler: Handler) -> None:
    handler.rig.stopped.wait(60)
    handler.close_connection = True


def hang_up(handler: Handler) -> None:
    handler.close_connection = True


def drip(handler: Handler) -> None:
    """A body that comes byte by byte, without an end."""
    _begin(handler)
    _for_ever(handler, b" ", every=0.01)


def drip_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Header: ")
    _for_ever(handler, b"x", every=0.01)


def huge(handler: Handler) -> None:
    _begin(handler)
    _for_ever(handler, b" " * 65536)


def huge_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    _for_ever(handler, b"X-Header: x\r\n" * 100)


def not_http(handler: Handler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    handler.close_connection = True


def _begin(handler: Handler, **headers: str) -> None:
    handler.send_response(200)
    for name, value in {"Metadata-Flavor": "Google", **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()


def _for_ever(handler: Handler, piece: bytes, every: float = 0.0) -> None:
    handler.close_connection = True
    ends = time.monotonic() + 30
    with contextlib.suppress(OSError):
        while time.monotonic() < ends and not handler.rig.stopped.wait(every):
            handler.wfile.write(piece)


# Who asks them


@contextlib.contextmanager
def watching(cloud: Any, **options: Any) -> Iterator[SimpleQueue[Notice]]:
    """What a watcher of this cloud is told meanwhile."""
    heard: SimpleQueue[Notice] = SimpleQueue()
    watcher = NoticePoller(cloud, heard.put, **options)
    watcher.start()
    try:
        yield heard
    finally:
        watcher.close()


def soon(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.005)
