"""Misbehaving clients and forked workers: the server keeps working, and releases its port."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from reprieve.progress.sinks import http
from reprieve.progress.sinks.http import HttpSink
from tests.support.http_kit import ask, listening
from tests.support.progress_kit import progress, wait_until


@pytest.fixture
def sink() -> Iterator[HttpSink]:
    with listening() as sink:
        yield sink


PROMETHEUS_ACCEPTS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def test_a_client_that_says_nothing_holds_nobody_up(sink: HttpSink, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < http._Handler.timeout <= 5
    monkeypatch.setattr(http._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", sink.port or 0), 10) as silent:
        assert ask(sink, "/healthz")[0] == 200
        silent.settimeout(10)
        assert silent.recv(1) == b"", "it is hung up on"


def test_too_many_clients_do_not_become_too_many_threads(sink: HttpSink) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", sink.port or 0), 10) for _ in range(100)]
    time.sleep(0.1)
    assert threading.active_count() <= before + http._MAX_CLIENTS
    for connection in silent:
        connection.close()
    wait_until(lambda: threading.active_count() <= before)
    assert ask(sink, "/healthz")[0] == 200


@pytest.mark.parametrize("sent", [b"\x00\xff\x16\x03", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 70_000])
def test_nonsense_is_answered_or_hung_up_on(sink: HttpSink, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", sink.port or 0), 10) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            client.recv(1000)
    assert ask(sink, "/healthz")[0] == 200


def test_no_name_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any) -> Any:
        raise AssertionError(f"a name was looked up: {args}")

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "getnameinfo"):
        monkeypatch.setattr(socket, name, asked)
    sink = HttpSink(0)
    sink.update(progress())
    assert ask(sink, "/nothing")[0] == 404
    sink.close(progress())


def test_a_forked_child_does_not_keep_the_port(sink: HttpSink) -> None:
    """A DataLoader worker that outlives its parent must not block the port for the next start."""
    ready, tell = os.pipe()
    wait, go = os.pipe()
    listening = sink._servers[0].fileno()
    if (child := os.fork()) == 0:
        with contextlib.suppress(OSError):
            os.fstat(listening)
            os.write(tell, b"0")
        os.write(tell, b"1" if threading.active_count() == 1 else b"0")
        os.read(wait, 1)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"1"
        assert ask(sink, "/healthz")[0] == 200, "the parent still answers"
        sink.close(progress())
        second = HttpSink(sink.port or 0)
        second.update(progress())
        second.close(progress())
    finally:
        os.write(go, b"1")
        os.waitpid(child, 0)
        for fd in (ready, tell, wait, go):
            os.close(fd)


def test_a_program_that_is_started_does_not_get_the_socket(sink: HttpSink) -> None:
    assert not os.get_inheritable(sink._servers[0].fileno())
