"""The HTTP server of a run, and real requests to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.client import HTTPConnection

from reprieve.progress.sinks.http import HttpSink
from tests.support.progress_kit import progress


@contextlib.contextmanager
def listening() -> Iterator[HttpSink]:
    sink = HttpSink(0)
    sink.update(progress())
    try:
        yield sink
    finally:
        sink.close(progress())


def ask(sink: HttpSink, path: str, method: str = "GET", **headers: str) -> tuple[int, str, bytes]:
    connection = HTTPConnection("127.0.0.1", sink.port or 0, timeout=10)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()
    finally:
        connection.close()
