"""A store in memory, served by one process over TCP: torch's `TCPStore`, with a client of our own.

It is what torchrun's agent serves to its workers, and what `detect` starts where there is no torchrun. We speak its
protocol ourselves because torch's client (2.13)

- has no time limit on most verbs: a host that is gone, or stopped, would hang the training thread for ever;
- waits in C++, where no signal handler runs, and where a thread that is woken while the interpreter ends aborts the
  process (exit code 134 in place of 143), as happens when the store's host ends first;
- says nothing when a `set` reaches nobody;
- writes a stack trace to stderr for each lost connection, and two warnings for each wait that runs out of time.

The protocol is the same in torch 2.6 to 2.13: a byte for the verb; numbers as they lie in memory; text and values with
their length before them. `_greet` checks that the other side speaks it.
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
"""Larger values are stored in parts: the server ends a connection that sends more than 8 MiB at once."""

_VALIDATE, _SET, _COMPARE_SET, _, _ADD, _CHECK, _WAIT, _COUNT_KEYS, _DELETE = range(9)
_CANCEL_WAIT, _PING = 12, 13
_MAGIC = 0x3C85F7CE
_WAIT_CANCELLED = b"\1"

# What a value that we store begins with, so that none is empty: to the server, an empty one is as good as none.
# Counters begin with a digit.
_PLAIN, _PARTS = b"=", b"+"
_NONE = b"?"


class TorchStore:
    """One connection to a `TCPStore`; `serve` starts one here."""

    def __init__(self, host: str, port: int, *, limit: timedelta = ANSWER_LIMIT, patient: bool = True) -> None:
        self.host = host
        self.port = port
        self._limit = limit
        self._server: TCPStore | None = None
        self._connection = TcpClient(host, port, limit, _greet)
        self._connection.open(patient=patient)

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0, *, limit: timedelta = ANSWER_LIMIT) -> TorchStore:
        """Start a store in this process, and connect to it. It lives as long as this object, closed or not.

        `host` is the address that it listens on, one of this machine; "0.0.0.0" or "::" stand for all of them.
        """
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # The server asks the name service about everybody who connects, and serves nobody meanwhile: 5 s for each
        # lost packet. On a socket that it made itself that is so on the loopback, too, which there is no IPv4 address.
        # In torch 2.6 only the older server, the one without libuv, takes another's socket.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=2048) as listener:
            port = listener.getsockname()[1]

            def start(*, libuv: bool) -> TCPStore:
                return TCPStore(
                    "localhost",
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
        with self._connection.talk():
            self._set(key, self._packed(key, value))

    def get(self, key: str) -> bytes | None:
        with self._connection.talk():
            return self._get(key)

    def add(self, key: str, amount: int) -> int:
        with self._connection.talk():
            self._connection.send(_verb(_ADD) + _text(key) + struct.pack("=q", amount))
            return self._number()

    def put_once(self, key: str, value: bytes) -> bytes:
        with self._connection.talk():
            packed = self._packed(key, value)
            held = self._compare_set(key, b"", packed)
            if held == packed:
                self._set(key, packed)  # the server without libuv (USE_LIBUV=0) wakes those who wait for a set only
                return value
            self._remove_parts(key, packed)
            return self._unpacked(key, held)

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        end = time.monotonic() + limit.total_seconds()
        with self._connection.talk():
            while True:
                self._connection.send(_verb(_WAIT) + struct.pack("=Q", 1) + _text(key))
                if self._connection.receive_within(end - time.monotonic()) is None:
                    self._connection.send(_verb(_CANCEL_WAIT))
                    # The key may have come meanwhile: then that is said first.
                    while self._connection.receive(1) != _WAIT_CANCELLED:
                        pass
                    return self._get(key)
                if (value := self._get(key)) is not None:  # None: removed again in between
                    return value

    def delete(self, key: str) -> None:
        with self._connection.talk():
            packed = self._compare_set(key, _NONE, _NONE)
            self._delete(key)
            self._remove_parts(key, packed)

    def client(self) -> TorchStore:
        return TorchStore(self.host, self.port, limit=self._limit, patient=False)

    def close(self) -> None:
        self._connection.close()

    def key_count(self) -> int:
        """How many keys there are, for everybody together (torch's own client keeps one of its own)."""
        with self._connection.talk():
            self._connection.send(_verb(_COUNT_KEYS))
            return self._number()

    # What follows is part of a talk.

    def _set(self, key: str, value: bytes) -> None:
        # Nothing is answered to a set; what is asked after it in the same breath is.
        check = _verb(_CHECK) + struct.pack("=Q", 1) + _text(key)
        self._connection.send(_verb(_SET) + _text(key) + _bytes(value) + check)
        self._connection.receive(1)

    def _get(self, key: str) -> bytes | None:
        held = self._compare_set(key, _NONE, _NONE)
        return None if held in (_NONE, b"") else self._unpacked(key, held)

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """What the key holds afterwards. Where there is none, and something was expected, nothing is stored and that is
        the answer: so this reads a key, too, without waiting for it as `GET` would."""
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
        return _PARTS + json.dumps([name, count]).encode()

    def _unpacked(self, key: str, packed: bytes) -> bytes:
        if packed[:1] == _PARTS:
            name, count = json.loads(packed[1:])
            return b"".join(self._compare_set(f"{key}+{name}.{part}", _NONE, _NONE) for part in range(count))
        return packed[1:] if packed[:1] == _PLAIN else packed

    def _remove_parts(self, key: str, packed: bytes) -> None:
        if packed[:1] == _PARTS:
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
        raise ConnectionError("it does not speak as torch's TCPStore does")


def _verb(verb: int) -> bytes:
    return bytes([verb])


def _bytes(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def _text(key: str) -> bytes:
    # The slash is what torch's own client puts before every key: ours can be read with it.
    return _bytes(b"/" + key.encode())
