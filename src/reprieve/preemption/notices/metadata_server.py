"""One HTTP request to a cloud's metadata server.

`Aws`, `Gcp` and `Azure` use it. A metadata server is a plain HTTP server on this machine or its network, so there is no
proxy (http.client uses none) and no redirect. The time and the size of a whole answer are limited, whether it arrives
in one piece, byte by byte or never.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from reprieve.errors import ConfigError, ReprieveError

_MAX_BYTES = 1 << 20
"""The limit for an answer with its headers. Azure lists all events of a scale set, some hundred bytes each."""

_OWN_HOSTS = frozenset({"localhost", "metadata.google.internal", "fd00:ec2::254"})
"""Beside loopback and link-local addresses: Google Cloud's name, and AWS' address for IPv6."""


class MetadataError(ReprieveError):
    """The server did not answer, or sent something unusable. The poller logs it and goes no further; the text is the
    same as long as the problem is the same."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    request: str
    status: int
    text: str
    headers: http.client.HTTPMessage

    def json(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        try:
            document = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise MetadataError(f"{self.request}: the answer is not JSON") from error
        if not isinstance(document, dict):
            raise MetadataError(f"{self.request}: the answer is not a JSON object")
        return document


class MetadataServer:
    """A cloud's metadata server: its address and the headers that it requires."""

    def __init__(self, url: str, *, limit: timedelta, headers: Mapping[str, str] | None = None) -> None:
        """`limit`: the time for a whole answer, from the first byte sent to the last received."""
        self._host, self._port = _address(url)
        self._limit = limit
        self._headers = dict(headers or {})

    def request(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        accept: tuple[int, ...] = (200,),
        limit: timedelta | None = None,
    ) -> Answer:
        """Send a request and return the answer. `accept`: the status codes that are no error to the caller."""
        limit = limit or self._limit
        connection = _Connection(self._host, self._port, limit.total_seconds())
        request = f"{method} {path.partition('?')[0]}"
        try:
            connection.request(method, path, headers={**self._headers, **(headers or {}), "Connection": "close"})
            with connection.getresponse() as response:
                body = response.read(_MAX_BYTES)
                if response.length:
                    raise MetadataError(f"{request}: the answer broke off")
        except TimeoutError as error:
            raise MetadataError(f"{request}: no whole answer within {limit.total_seconds():g} s") from error
        except OSError as error:
            raise MetadataError(f"{request}: {error.strerror or error}") from error
        except http.client.HTTPException as error:
            raise MetadataError(f"{request}: the answer is not HTTP ({type(error).__name__})") from error
        finally:
            connection.close()
        if response.status not in accept:
            raise MetadataError(f"{request}: answered with status {response.status}")
        return Answer(request, response.status, body.decode("utf-8", errors="replace"), response.headers)


class _Connection(http.client.HTTPConnection):
    """A connection with one timeout for the whole answer: that of a socket counts from each byte to the next."""

    def __init__(self, host: str, port: int, limit: float) -> None:
        super().__init__(host, port, timeout=limit)
        self._deadline = time.monotonic() + limit

    def connect(self) -> None:
        super().connect()
        self.sock = _LimitedSocket(self.sock, self._deadline)


class _LimitedSocket(socket.socket):
    """A socket that fails at a deadline, and after `_MAX_BYTES`."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        super().__init__(fileno=connected.detach())
        self._deadline = deadline
        self._remaining_bytes = _MAX_BYTES
        self.settimeout(max(0.001, deadline - time.monotonic()))

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        if (remaining_s := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        self.settimeout(remaining_s)
        count = super().recv_into(buffer, nbytes, flags)
        self._remaining_bytes -= count
        if self._remaining_bytes < 0:
            raise MetadataError(f"an answer of more than {_MAX_BYTES} bytes")
        return count


def _address(url: str) -> tuple[str, int]:
    """Return host and port of a URL that can be a metadata server, or a test's. A URL from the environment must not
    let any other host stop a training job."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise ConfigError(f"{url!r} is not the URL of a metadata server: {error}") from None
    if parts.scheme != "http" or not host or f"{parts.path}{parts.query}{parts.fragment}" not in ("", "/"):
        raise ConfigError(f"{url!r} is not the URL of a metadata server: write it like 'http://127.0.0.1:1338'")
    if host not in _OWN_HOSTS and not _is_local(host):
        raise ConfigError(
            f"{url!r} is not the URL of a metadata server: {host} is neither a loopback nor a link-local address,"
            " nor a cloud's own name"
        )
    return host, port


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_link_local
