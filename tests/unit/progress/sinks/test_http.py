"""The HTTP server, over real sockets."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from reprieve.progress.formats import progress_json
from reprieve.progress.sinks.http import HttpSink
from tests.support.http_kit import ask, listening
from tests.support.progress_kit import progress, strict_json

PROMETHEUS_ACCEPTS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.fixture
def sink() -> Iterator[HttpSink]:
    with listening() as sink:
        yield sink


@pytest.mark.parametrize("path", ["/", "/progress", "/progress?pretty=1"])
def test_json(sink: HttpSink, path: str) -> None:
    status, kind, data = ask(sink, path)
    assert (status, kind) == (200, "application/json")
    assert strict_json(data)["currentStep"] == 150


def test_the_form_of_the_file(sink: HttpSink) -> None:
    status, kind, data = ask(sink, "/trainingProgress?x=1")
    assert (status, kind) == (200, "application/json")
    assert strict_json(data) == progress_json.for_training_progress(progress())


@pytest.mark.parametrize("accept", [PROMETHEUS_ACCEPTS, "*/*", "text/plain", "text/html,*/*;q=0.8"])
def test_metrics_for_prometheus_curl_and_browsers(sink: HttpSink, accept: str) -> None:
    status, kind, data = ask(sink, "/metrics", Accept=accept)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b"\nreprieve_step 150\n" in data


@pytest.mark.parametrize("headers", [{}, {"Accept": "application/json"}])
def test_metrics_for_a_controller(sink: HttpSink, headers: dict[str, str]) -> None:
    """Go's client sends no Accept header, and the controller reads JSON at /metrics."""
    status, kind, data = ask(sink, "/metrics", **headers)
    assert (status, kind) == (200, "application/json")
    assert strict_json(data)["progressPercentage"] == 50


def test_health(sink: HttpSink) -> None:
    assert ask(sink, "/healthz")[::2] == (200, b"ok\n")


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz"])
def test_head(sink: HttpSink, path: str) -> None:
    with socket.create_connection(("127.0.0.1", sink.port or 0), 10) as client:
        client.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        answer = client.makefile("rb").read()
    head, _, data = answer.partition(b"\r\n\r\n")
    assert b" 200 OK\r\n" in head
    assert b"Content-Length: 0" not in head
    assert data == b""


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/etc/passwd", 404), ("GET", "/progress/", 404), ("HEAD", "/x", 404), ("POST", "/", 501)],
)  # fmt: skip
def test_nothing_else_is_answered(sink: HttpSink, method: str, path: str, status: int) -> None:
    assert ask(sink, path, method)[0] == status


def test_who_asks_is_not_logged(sink: HttpSink, capfd: pytest.CaptureFixture[str]) -> None:
    for path in ("/", "/nothing"):
        ask(sink, path)
    assert capfd.readouterr() == ("", "")


def test_the_newest_is_told(sink: HttpSink) -> None:
    sink.update(progress(step=151))
    assert strict_json(ask(sink, "/")[2])["currentStep"] == 151


def test_a_free_port_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sink = HttpSink(0)
    with caplog.at_level(logging.INFO, "reprieve"):
        sink.update(progress())
    assert f"http://127.0.0.1:{sink.port}" in caplog.text
    assert str(sink.port) in sink.name
    sink.close(progress())


def test_a_port_in_use_says_what_to_do(sink: HttpSink) -> None:
    second = HttpSink(sink.port or 0)
    with pytest.raises(OSError, match=f"port {sink.port} is in use: set REPRIEVE_METRICS_PORT to another port"):
        second.update(progress())
    assert second.port is None
    second.close(progress())


def test_a_port_that_becomes_free_is_taken(sink: HttpSink) -> None:
    second = HttpSink(sink.port or 0)
    with pytest.raises(OSError, match="in use"):
        second.update(progress())
    sink.close(progress())
    second.update(progress(step=7))
    assert strict_json(ask(second, "/")[2])["currentStep"] == 7
    second.close(progress())


def test_it_ends_at_once(sink: HttpSink) -> None:
    began = time.monotonic()
    sink.close(progress())
    assert time.monotonic() - began < 1.0
    with pytest.raises(ConnectionError):
        ask(sink, "/")


def test_several_addresses_have_one_port() -> None:
    sink = HttpSink(0, ["127.0.0.1", "127.0.0.2"])
    sink.update(progress())
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.create_connection((address, sink.port or 0), 10) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert client.makefile("rb").read().endswith(b"ok\n")
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.3", sink.port or 0), 10)
    sink.close(progress())


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    sink = HttpSink(0, ["127.0.0.1", "::1"])
    sink.update(progress())
    with socket.create_connection(("::1", sink.port or 0), 10) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert json.loads(client.makefile("rb").read().partition(b"\r\n\r\n")[2])["currentStep"] == 150
    sink.close(progress())
