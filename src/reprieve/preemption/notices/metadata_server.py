"""One question to a cloud's metadata server, and its answer.

What `Aws`, `Gcp` and `Azure` stand on. A metadata server is a plain HTTP server on this machine or beside it, so: no
proxy (http.client knows none), no redirect, and a limit on the time and the size of a whole answer, whether it comes in
one piece, byte by byte or never.
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

_MOST_BYTES = 1 << 20
"""Of an answer, headers included. Azure lists the events of all machines of a scale set, some hundred bytes each."""

_OWN_HOSTS = frozenset({"localhost", "metadata.google.internal", "fd00:ec2::254"})
"""Beside loopback and link-local addresses: Google Cloud's name, and AWS' address for IPv6."""


class MetadataError(ReprieveError):
    """The server did not answer, or with something that makes no sense. It goes no further than the watcher's log, and
    has the same text as long as the trouble is the same."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and to what."""

    what: str
    status: int
    text: str
    headers: http.client.HTTPMessage

    def json(self) -> dict[str, Any]:
        """The JSON object that it is."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise MetadataError(f"{self.what}: the answer is not JSON") from error
        if not isinstance(found, dict):
            raise MetadataError(f"{self.what}: the answer is not a JSON object")
        return found


class MetadataServer:
    """Where a cloud's metadata server is, and how it wants to be asked."""

    def __init__(self, url: str, *, limit: timedelta, headers: Mapping[str, str] | None = None) -> None:
        """`limit`: for a whole answer, from the first byte sent to the last received."""
        self._host, self._port = _address(url)
        self._limit = limit
        self._headers = dict(headers or {})

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        accept: tuple[int, ...] = (200,),
        limit: timedelta | None = None,
    ) -> Answer:
        """`accept`: the status codes that mean something to the caller. Any other is an error."""
        limit = limit or self._limit
        connection = _Connection(self._host, self._port, limit.total_seconds())
        what = f"{method} {path.partition('?')[0]}"
        try:
            connection.request(method, path, headers={**self._headers, **(headers or {}), "Connection": "close"})
            with connection.getresponse() as response:
                body = response.read(_MOST_BYTES)
                if response.length:
                    raise MetadataError(f"{what}: the answer broke off")
        except TimeoutError as error:
            raise MetadataError(f"{what}: no whole answer within {limit.total_seconds():g} s") from error
        except OSError as error:
            raise MetadataError(f"{what}: {error.strerror or error}") from error
        except http.client.HTTPException as error:
            raise MetadataError(f"{what}: that is not HTTP ({type(error).__name__})") from error
        finally:
            connection.close()
        if response.status not in accept:
            raise MetadataError(f"{what}: answered with status {response.status}")
        return Answer(what, response.status, body.decode("utf-8", errors="replace"), response.headers)


class _Connection(http.client.HTTPConnection):
    """`timeout` alone would count from each byte to the next."""

    def __init__(self, host: str, port: int, limit: float) -> None:
        super().__init__(host, port, timeout=limit)
        self._ends = time.monotonic() + limit

    def connect(self) -> None:
        super().connect()
        self.sock = _LimitedSocket(self.sock, self._ends)


class _LimitedSocket(socket.socket):
    """Gives up at a moment in time, and after so many bytes."""

    def __init__(self, connected: socket.socket, ends: float) -> None:
        super().__init__(fileno=connected.detach())
        self._ends = ends
        self._bytes_left = _MOST_BYTES
        self.settimeout(max(0.001, ends - time.monotonic()))

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        if (left := self._ends - time.monotonic()) <= 0:
            raise TimeoutError
        self.settimeout(left)
        count = super().recv_into(buffer, nbytes, flags)
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise MetadataError(f"an answer of more than {_MOST_BYTES} bytes")
        return count


def _address(url: str) -> tuple[str, int]:
    """Host and port; only what can be a metadata server, or a test's. A URL from the environment must not make a
    training job ask, or be stopped by, just anybody."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise ConfigError(f"{url!r} is not the URL of a metadata server: {error}") from None
    if parts.scheme != "http" or not host or f"{parts.path}{parts.query}{parts.fragment}" not in ("", "/"):
        raise ConfigError(f"{url!r} is not the URL of a metadata server: write it like 'http://127.0.0.1:1338'")
    if host not in _OWN_HOSTS and not _is_near(host):
        raise ConfigError(
            f"{url!r} is not the URL of a metadata server: {host} is neither a loopback nor a link-local address,"
            " nor a cloud's own name"
        )
    return host, port


def _is_near(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_link_local
