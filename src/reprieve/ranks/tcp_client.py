"""A TCP connection on which every answer has a time limit.

One thread uses it at a time. A broken connection stays broken: every later call raises `StoreLost` at once. If an
exception, for example from a signal handler, interrupts an exchange, the connection is out of step and is reopened.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from reprieve.errors import RanksError, StoreLost

MAX_WAIT_S = 86400.0
"""The longest single wait: a socket's timeout must fit into 31 bits of milliseconds."""
RECONNECT_INTERVAL_S = 0.05
_CONNECT_TIMEOUT_S = 5.0
"""Of one try. A host whose network is not up yet may not answer at all."""
_NOT_YET = (
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
)
"""Errors of a connection that may succeed later."""

# A host without power sends nothing. The kernel probes it after 10 s of silence, and gives up 25 s later.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 5))


class TcpClient:
    """A connection to `address`. `greet` runs first on each new connection."""

    def __init__(self, host: str, port: int, limit: timedelta, greet: Callable[[TcpClient], None]) -> None:
        self._socket: socket.socket | None = None
        self.address = (host, port)
        self._limit_s = limit.total_seconds()
        self._greet = greet
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._deadline = 0.0

    def open(self, *, retry: bool) -> None:
        """Connect now. With `retry`, wait until the limit for a server that cannot be reached yet: the name of a pod
        exists once it is scheduled, its address answers once its network is up, its port once it listens."""
        with self._exchange(self._limit_s, connect=False):
            self._connect(retry=retry)

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Send and receive within the limit."""
        with self._exchange(self._limit_s):
            yield

    def send(self, data: bytes) -> None:
        sock = self._open_socket()
        sock.settimeout(self._remaining_s())
        sock.sendall(data)

    def receive(self, count: int) -> bytes:
        """Receive exactly `count` bytes."""
        data = bytearray(count)
        view = memoryview(data)
        sock = self._open_socket()
        while view:
            sock.settimeout(self._remaining_s())
            received = sock.recv_into(view)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            view = view[received:]
        return bytes(data)

    def receive_within(self, seconds: float) -> bytes | None:
        """Receive one byte; None if it does not come in time. Afterwards the exchange has its whole limit again."""
        deadline = time.monotonic() + seconds
        while True:
            self._deadline = min(deadline, time.monotonic() + MAX_WAIT_S)
            try:
                return self.receive(1)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return None
            finally:
                self._deadline = time.monotonic() + self._limit_s

    def close(self) -> None:
        """Close the connection, from any thread. A thread that waits for an answer gets `StoreLost`."""
        self._lost = self._lost or "it was closed here"
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if self._lock.acquire(blocking=False):  # otherwise the thread that holds it closes the socket
                self._drop()
                self._lock.release()

    def __del__(self) -> None:
        self._drop()  # the connection of a thread that has ended

    @contextlib.contextmanager
    def _exchange(self, limit_s: float, *, connect: bool = True) -> Iterator[None]:
        if not self._lock.acquire(timeout=limit_s):
            raise RanksError(
                "another thread waits on this connection to the store: use a connection of your own, from client()"
            )
        try:
            if self._lost is not None:
                raise StoreLost(self._message())
            self._deadline = time.monotonic() + limit_s
            if connect and self._socket is None:
                self._connect(retry=False)
            yield
        except OSError as error:
            self._drop()
            is_timeout = isinstance(error, TimeoutError) and error.errno is None
            reason = f"no answer within {limit_s:g} s" if is_timeout else error.strerror or str(error)
            self._lost = self._lost or reason
            raise StoreLost(self._message()) from error
        except BaseException:
            self._drop()
            raise
        finally:
            self._lock.release()

    def _connect(self, *, retry: bool) -> None:
        while True:
            try:
                remaining_s = self._remaining_s()
                timeout_s = min(_CONNECT_TIMEOUT_S, remaining_s) if retry else remaining_s
                sock = socket.create_connection(self.address, timeout=timeout_s)
                break
            except OSError as error:
                is_final = not isinstance(error, socket.gaierror | TimeoutError) and error.errno not in _NOT_YET
                if not retry or is_final or time.monotonic() + RECONNECT_INTERVAL_S > self._deadline:
                    raise
                time.sleep(RECONNECT_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = sock
        if self._lost is not None:  # closed meanwhile
            raise ConnectionResetError(self._lost)
        self._greet(self)

    def _open_socket(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _message(self) -> str:
        host, port = self.address
        return f"the store at {host}:{port} that the ranks communicate through is lost: {self._lost}"
