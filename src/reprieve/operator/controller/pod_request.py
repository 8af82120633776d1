"""One HTTP request to a pod, whose program is not trusted: within 2 s, at most 256 KiB, no redirect, nothing reused."""

from __future__ import annotations

import asyncio

from reprieve.errors import ReprieveError
from reprieve.kubernetes.api import within
from reprieve.kubernetes.jobs.cluster import MOST_BYTES

TIMEOUT_S = 2.0
_MAX_HEADERS = 16 * 1024


class NoAnswer(ReprieveError):
    """The pod does not answer, or not with the requested thing. The message says why."""


class BadAnswer(NoAnswer):
    """Something answers that is not Reprieve's progress server."""


async def get(address: str, port: int, path: str, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the body of a 200."""
    has_begun = asyncio.Event()
    try:
        return await within(timeout_s, _get(address, port, path, has_begun))
    except asyncio.TimeoutError:
        if has_begun.is_set():
            raise BadAnswer(f"its answer does not end within {timeout_s:g} s") from None
        raise NoAnswer(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise NoAnswer(error.strerror or str(error) or type(error).__name__) from error


async def _get(address: str, port: int, path: str, has_begun: asyncio.Event) -> bytes:
    reader, writer = await asyncio.open_connection(address, port, limit=_MAX_HEADERS)
    try:
        host = f"[{address}]" if ":" in address else address
        # 1.0: the end of the answer is the end of the connection, never a chunk.
        request = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: application/json\r\n\r\n"
        writer.write(request.encode())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise BadAnswer("its answer is not HTTP") from None
        has_begun.set()
        status = head.partition(b"\r\n")[0].split()
        if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or not status[1].isdigit():
            raise BadAnswer("its answer is not HTTP")
        if status[1] != b"200":
            raise BadAnswer(f"it answers {status[1].decode()}")
        return await _body(reader)
    finally:
        writer.transport.abort()


async def _body(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while part := await reader.read(65536):
        body += part
        if len(body) > MOST_BYTES:
            raise BadAnswer(f"its answer is longer than {MOST_BYTES >> 10} KiB")
    return bytes(body)
