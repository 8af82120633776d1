"""One request to a pod: what any program there may answer, and how long it may take."""

from __future__ import annotations

import asyncio
import time

import pytest

from reprieve.kubernetes.jobs.cluster import MOST_BYTES
from reprieve.operator.controller.pod_request import BadAnswer, NoAnswer, get
from tests.support.status_controller_kit import PodServer, http_answer


def ask(content: bytes, *, holds: bool = False, timeout_s: float = 2.0) -> bytes:
    with PodServer(content) as pod:
        pod.holds = holds
        return asyncio.run(get("127.0.0.1", pod.port, "/trainingProgress", timeout_s=timeout_s))


def test_it_returns_the_body_and_asks_for_the_path() -> None:
    with PodServer(http_answer({"step": 1}, headers="Content-Type: application/json\r\n")) as pod:
        assert asyncio.run(get("127.0.0.1", pod.port, "/trainingProgress")) == b'{"step": 1}'
        [request] = pod.requests
    assert request.startswith(b"GET /trainingProgress HTTP/1.0\r\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (http_answer(b"x" * (MOST_BYTES + 1)), "longer than 256 KiB"),
        (http_answer(b"", status="302 Found", headers="Location: http://169.254.169.254/\r\n"), "it answers 302"),
        (http_answer(b"no", status="500 Internal Server Error"), "it answers 500"),
        (b"220 mail.example.com ESMTP\r\n\r\n", "not HTTP"),
        (b"x" * 100_000, "not HTTP"),
        (b"HTTP/1.0 200 OK\r\n", "not HTTP"),
        (b"", "not HTTP"),
    ],
    ids=["too long", "redirect", "error", "mail", "endless head", "torn head", "nothing"],
)
def test_what_is_no_answer_is_named(content: bytes, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        ask(content or b"\r\n")


def test_an_answer_that_never_ends_takes_no_longer_than_the_time_limit() -> None:
    began = time.monotonic()
    with pytest.raises(BadAnswer, match=r"its answer does not end within 0.3 s"):
        ask(http_answer({"step": 1}), holds=True, timeout_s=0.3)
    assert time.monotonic() - began < 5


def test_a_port_that_nobody_listens_on_is_named() -> None:
    with PodServer() as pod:
        port = pod.port
    with pytest.raises(NoAnswer, match=r"refused|Connect call failed"):
        asyncio.run(get("127.0.0.1", port, "/"))


def test_an_address_of_ipv6() -> None:
    async def run() -> tuple[bytes, bytes]:
        requests: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(http_answer({"step": 1}))
            writer.close()

        async with await asyncio.start_server(answer, "::1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await get("::1", port, "/"), requests[0].replace(str(port).encode(), b"PORT")

    assert asyncio.run(run()) == (
        b'{"step": 1}',
        b"GET / HTTP/1.0\r\nHost: [::1]:PORT\r\nAccept: application/json\r\n\r\n",
    )
