"""A store in memory, served by one process over TCP: torch's `TCPStore`, with our own client.

torchrun's agent serves such a store to its workers; without torchrun, `detect` starts one. We implement the client side
of the protocol ourselves because torch's client (2.13)

- has no time limit on most verbs: a host that is gone, or stopped, would hang the training thread forever;
- waits in C++, where no signal handler runs, and where a thread that wakes up while the interpreter exits aborts the
  process (exit code 134 instead of 143), as happens when the store's host exits first;
- does not report a `set` that reaches no server;
- writes a stack trace to stderr for each lost connection, and two warnings for each wait that times out.

The protocol is the same in torch 2.6 to 2.13: one byte for the verb, numbers in native byte order, strings and values
with their length before them. `_greet` checks that the server speaks it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from reprieve.ranks.store import ANSWER_LIMIT
from reprieve.ranks.tcp_client import TcpClient

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

PART_BYTES = 4 * 2**20
"""Larger values are stored in parts: the server closes a connection that sends more than 8 MiB at once."""

_VALIDATE, _SET, _COMPARE_SET, _, _ADD, _CHECK, _WAIT, _COUNT_KEYS, _DELETE = range(9)
_CANCEL_WAIT, _PING = 12, 13
_MAGIC = 0x3C85F7CE
_WAIT_CANCELLED = b"\1"

# The first byte of each value that we store. So none is empty: to the server, an empty value is a missing one. Counters
# begin with a digit.
_PLAIN, _IN_PARTS = b"=", b"+"
_MISSING = b"?"


class TorchStore:
    """A connection to a `TCPStore`. `serve` starts a store in this process."""

    def __init__(self, host: str, port: int, *, limit: timedelta = ANSWER_LIMIT, retry: bool = True) -> None:
        self.host = host
        self.port = port
        self._limit = limit
        self._server: TCPStore | None = None
        self._connection = TcpClient(host, port, limit, _greet)
        self._connection.open(retry=retry)

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0, *, limit: timedelta = ANSWER_LIMIT) -> TorchStore:
        """Start a store in this process and connect to it. It lives as long as this object, closed or not.

        `host` is the address of this machine that it listens on; "0.0.0.0" and "::" mean all of them.
        """
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # The server looks up the name of each client that connects, and blocks meanwhile: 5 s for each lost packet.
        # With a socket of its own it does so on the loopback, too, where it sees no IPv4 address. So it gets a socket
        # from us. In torch 2.6 only the older server, without libuv, accepts one.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Its own client connects to it, too: by the loopback, unless it listens on another address alone.
        own_host = "localhost" if host in ("127.0.0.1", "::1", "0.0.0.0", "::") else host  # noqa: S104 - not bound here
        with socket.create_server((host, port), family=family, backlog=2048) as listener:
            port = listener.getsockname()[1]

            def start(*, libuv: bool) -> TCPStore:
                return TCPStore(
                    own_host,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=limit,
                    master_listen_fd=os.dup(listener.fileno()),
                    use_libuv=libuv,
                )

            try:
                server = start(libuv=_version(torch.__version__) >= (2, 8))
            except NotImplementedError:
                server = start(libuv=False)
        store = cls({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, limit=limit)  # noqa: S104 - not bound here
        store._server = server
        return store

    def set(self, key: str, value: bytes) -> None:
        with self._connection.exchange():
            self._set(key, self._packed(key, value))

    def get(self, key: str) -> bytes | None:
        with self._connection.exchange():
            return self._get(key)

    def add(self, key: str, amount: int) -> int:
        with self._connection.exchange():
            self._connection.send(_verb(_ADD) + _text(key) + struct.pack("=q", amount))
            return self._number()

    def put_once(self, key: str, value: bytes) -> bytes:
        with self._connection.exchange():
            packed = self._packed(key, value)
            stored = self._compare_set(key, b"", packed)
            if stored == packed:
                self._set(key, packed)  # without libuv (USE_LIBUV=0), the server wakes waiting clients only on a set
                return value
            self._remove_parts(key, packed)
            return self._unpacked(key, stored)

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        deadline = time.monotonic() + limit.total_seconds()
        with self._connection.exchange():
            while True:
                self._connection.send(_verb(_WAIT) + struct.pack("=Q", 1) + _text(key))
                if self._connection.receive_within(deadline - time.monotonic()) is None:
                    self._connection.send(_verb(_CANCEL_WAIT))
                    # If the key was set meanwhile, the answer to that comes first.
                    while self._connection.receive(1) != _WAIT_CANCELLED:
                        pass
                    return self._get(key)
                if (value := self._get(key)) is not None:  # None: deleted in between
                    return value

    def delete(self, key: str) -> None:
        with self._connection.exchange():
            packed = self._compare_set(key, _MISSING, _MISSING)
            self._delete(key)
            self._remove_parts(key, packed)

    def client(self) -> TorchStore:
        return TorchStore(self.host, self.port, limit=self._limit, retry=False)

    def close(self) -> None:
        self._connection.close()

    def key_count(self) -> int:
        """Return the number of keys of all clients (torch's own client keeps one for itself). Tests check for leaks."""
        with self._connection.exchange():
            self._connection.send(_verb(_COUNT_KEYS))
            return self._number()

    # The methods below run within an exchange.

    def _set(self, key: str, value: bytes) -> None:
        # The server does not answer a set. The check after it, in the same packet, is answered.
        check = _verb(_CHECK) + struct.pack("=Q", 1) + _text(key)
        self._connection.send(_verb(_SET) + _text(key) + _bytes(value) + check)
        self._connection.receive(1)

    def _get(self, key: str) -> bytes | None:
        stored = self._compare_set(key, _MISSING, _MISSING)
        return None if stored in (_MISSING, b"") else self._unpacked(key, stored)

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Return the value of the key afterwards. If the key is not set and `expected` is not empty, the server stores
        nothing and answers with `expected`: this also reads a key, without waiting for it as `GET` would."""
        self._connection.send(_verb(_COMPARE_SET) + _text(key) + _bytes(expected) + _bytes(value))
        return self._connection.receive(struct.unpack("=Q", self._connection.receive(8))[0])

    def _delete(self, key: str) -> None:
        self._connection.send(_verb(_DELETE) + _text(key))
        self._number()

    def _number(self) -> int:
        return int(struct.unpack("=q", self._connection.receive(8))[0])

    def _packed(self, key: str, value: bytes) -> bytes:
        if len(value) < PART_BYTES:
            return _PLAIN + value
        name = uuid.uuid4().hex
        count = -(-len(value) // PART_BYTES)
        for part in range(count):
            self._set(f"{key}+{name}.{part}", value[part * PART_BYTES : (part + 1) * PART_BYTES])
        return _IN_PARTS + json.dumps([name, count]).encode()

    def _unpacked(self, key: str, packed: bytes) -> bytes:
        if packed[:1] == _IN_PARTS:
            name, count = json.loads(packed[1:])
            return b"".join(self._compare_set(f"{key}+{name}.{part}", _MISSING, _MISSING) for part in range(count))
        return packed[1:] if packed[:1] == _PLAIN else packed

    def _remove_parts(self, key: str, packed: bytes) -> None:
        if packed[:1] == _IN_PARTS:
            name, count = json.loads(packed[1:])
            for part in range(count):
                self._delete(f"{key}+{name}.{part}")


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _greet(connection: TcpClient) -> None:
    nonce = secrets.token_bytes(4)
    connection.send(_verb(_VALIDATE) + struct.pack("=I", _MAGIC) + _verb(_PING) + nonce)
    if connection.receive(4) != nonce:
        raise ConnectionError("the server does not speak the protocol of torch's TCPStore")


def _verb(verb: int) -> bytes:
    return bytes([verb])


def _bytes(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def _text(key: str) -> bytes:
    # torch's own client puts a slash before every key: with it, that client can read our keys.
    return _bytes(b"/" + key.encode())
