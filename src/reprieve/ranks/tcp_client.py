"""A TCP connection on which every answer has a time limit.

Used by one thread at a time. A connection that breaks stays broken (`StoreLost`, at once, for every later call); one
whose talk was cut short by an exception, such as a signal handler's, is out of step and is made anew.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from reprieve.errors import RanksError, StoreLost

_DAY_S = 86400.0
"""The longest single wait: a socket's time-out must fit into 31 bits of milliseconds."""

# A host that lost its power sends nothing more. The kernel asks after 10 s of silence, and gives up 25 s later.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 5))


class TcpClient:
    """To `address`; `greet` is spoken on it first."""

    def __init__(self, host: str, port: int, limit: timedelta, greet: Callable[[TcpClient], None]) -> None:
        self._socket: socket.socket | None = None
        self.address = (host, port)
        self._limit_s = limit.total_seconds()
        self._greet = greet
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._end = 0.0

    def open(self, *, patient: bool) -> None:
        """Connect now. A patient one tries again, until the limit, where nobody listens yet."""
        with self._talk(self._limit_s, connect=False):
            self._connect(patient=patient)

    @contextlib.contextmanager
    def talk(self) -> Iterator[None]:
        """One question and its answer, within the limit."""
        with self._talk(self._limit_s):
            yield

    def send(self, data: bytes) -> None:
        sock = self._ready()
        sock.settimeout(self._left())
        sock.sendall(data)

    def receive(self, count: int) -> bytes:
        """Exactly so many bytes."""
        data = bytearray(count)
        view = memoryview(data)
        sock = self._ready()
        while view:
            sock.settimeout(self._left())
            got = sock.recv_into(view)
            if not got:
                raise ConnectionResetError("it has closed the connection")
            view = view[got:]
        return bytes(data)

    def receive_within(self, seconds: float) -> bytes | None:
        """One byte; None when it does not come in time. Afterwards the talk has its whole limit again."""
        end = time.monotonic() + seconds
        while True:
            self._end = min(end, time.monotonic() + _DAY_S)
            try:
                return self.receive(1)
            except TimeoutError:
                if time.monotonic() >= end:
                    return None
            finally:
                self._end = time.monotonic() + self._limit_s

    def close(self) -> None:
        """From any thread; one that waits for an answer gets `StoreLost`."""
        self._lost = self._lost or "it was closed here"
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if self._lock.acquire(blocking=False):  # else whoever holds it closes
                self._drop()
                self._lock.release()

    def __del__(self) -> None:
        self._drop()  # of a thread that has ended

    @contextlib.contextmanager
    def _talk(self, limit_s: float, *, connect: bool = True) -> Iterator[None]:
        if not self._lock.acquire(timeout=limit_s):
            raise RanksError("another thread waits on this connection to the store: take one of its own, with client()")
        try:
            if self._lost is not None:
                raise StoreLost(self._message())
            self._end = time.monotonic() + limit_s
            if connect and self._socket is None:
                self._connect(patient=False)
            yield
        except OSError as error:
            self._drop()
            silent = isinstance(error, TimeoutError) and error.errno is None
            said = f"no answer within {limit_s:g} s" if silent else error.strerror or str(error)
            self._lost = self._lost or said
            raise StoreLost(self._message()) from error
        except BaseException:
            self._drop()
            raise
        finally:
            self._lock.release()

    def _connect(self, *, patient: bool) -> None:
        while True:
            try:
                sock = socket.create_connection(self.address, timeout=self._left())
                break
            except ConnectionRefusedError:
                if not patient or time.monotonic() + 0.05 > self._end:
                    raise
                time.sleep(0.05)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = sock
        if self._lost is not None:  # closed meanwhile
            raise ConnectionResetError(self._lost)
        self._greet(self)

    def _ready(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _message(self) -> str:
        host, port = self.address
        return f"the store at {host}:{port} that the ranks talk through is lost: {self._lost}"
