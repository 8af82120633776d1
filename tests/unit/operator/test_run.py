"""`reprieve operator` as a process: it serves, stops on SIGTERM, and ends when a part of it does."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.kubernetes_server import KubernetesServer
from tests.support.train_job_crd import upstream_definition

CONFIGURATIONS = "mutatingwebhookconfigurations"
WITHIN_S = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        webhooks = [{"name": "create", "clientConfig": {"service": {}}}]
        server.put(CONFIGURATIONS, {"metadata": {"name": "reprieve-operator"}, "webhooks": webhooks})
        server.put("customresourcedefinitions", upstream_definition())
        yield server


Start = Callable[..., tuple[subprocess.Popen[str], int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an operator on a free port. It is killed after the test."""
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> tuple[subprocess.Popen[str], int]:
            process, port = start_operator(*options)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process, port

        yield start


def start_operator(*options: str) -> tuple[subprocess.Popen[str], int]:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    ports = ["--port", str(port), "--metrics-port", "0"]
    command = [sys.executable, "-m", "reprieve", "operator", *ports, "--drain", "3s", *options]
    environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment), port


def wait_until_ready(port: int, server: KubernetesServer) -> httpx.Client:
    """Return a client that trusts the caBundle alone, as the API server does."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        bundle = server.get(CONFIGURATIONS, "reprieve-operator")["webhooks"][0]["clientConfig"].get("caBundle")
        if bundle:
            context = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
            client = httpx.Client(verify=context, transport=_Named(port, context))
            with contextlib.suppress(httpx.TransportError):
                if client.get("https://reprieve-operator.system.svc/readyz").status_code == 200:
                    return client
            client.close()
        assert time.monotonic() < deadline
        time.sleep(0.1)


class _Named(httpx.HTTPTransport):
    """Calls the port of this machine by the name of the Service."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(verify=context)
        self._port = port

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["sni_hostname"] = request.url.host
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return super().handle_request(request)


def test_it_serves_until_sigterm_and_exits_with_0(server: KubernetesServer, start: Start) -> None:
    process, port = start()
    with contextlib.closing(wait_until_ready(port, server)) as client:
        assert client.get("https://reprieve-operator.system.svc/healthz").text == "ok\n"
        process.send_signal(signal.SIGTERM)
        while (answer := client.get("https://reprieve-operator.system.svc/readyz").text) == "ok\n":
            time.sleep(0.05)
        assert answer == "stopping\n"
    _, log = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, log
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["message"] for line in lines if line["logger"].endswith(".run")] == ["started", "stopping", "stopped"]
    assert all(line["level"] == "info" for line in lines), log
    assert "PRIVATE KEY" not in log


def test_it_waits_for_an_api_server_that_is_away(server: KubernetesServer, start: Start) -> None:
    server.stop()
    process, port = start()
    time.sleep(2)
    assert process.poll() is None
    server.start()
    wait_until_ready(port, server).close()
    process.terminate()
    _, log = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, log


def test_a_part_that_ends_ends_the_process_with_its_reason(server: KubernetesServer, start: Start) -> None:
    webhooks = [{"name": "no client config"}]
    server.put(CONFIGURATIONS, {"metadata": {"name": "reprieve-operator"}, "webhooks": webhooks})
    process, _ = start()
    _, log = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 1, log
    assert "the operator's part 'certificates' ended: KeyError: 'clientConfig'" in log


def test_a_port_that_is_in_use(server: KubernetesServer, start: Start) -> None:
    with socket.create_server(("", 0)) as taken:
        process, _ = start("--port", str(taken.getsockname()[1]))
        _, log = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 2
    assert "Address already in use; choose another --port" in log
