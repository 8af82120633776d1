"""A store in memory, served by one process over TCP: torch's `TCPStore`.

It is what torchrun's agent serves to its workers, and what `detect` starts where there is no torchrun.

Facts about TCPStore (torch 2.13) that this module makes up for:

- `set` returns before the server has answered, even when the server is dead: each is followed by a `check`.
- Only `wait` and `get` have a time limit, and after it they still wait for the server to confirm: see `errands`.
- A value of more than 8 MiB ends the connection: larger ones are stored in parts.
- A `wait` that runs out of time writes two warnings to stderr: short ones are made of `check`.
- `compare_set` with nothing expected also replaces an empty value: what we store is never empty.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

from reprieve.errors import StoreLost
from reprieve.ranks.errands import Errands
from reprieve.ranks.store import ANSWER_LIMIT

T = TypeVar("T")

PART_BYTES = 4 * 2**20
"""Half of what the server takes in one message."""

_SHORT = timedelta(seconds=2)
"""Up to here `wait` asks again and again, from every millisecond to every 20; beyond, it blocks."""

_PLAIN = b"="
_PARTS = b"+"


class TorchStore:
    """One connection to a `TCPStore`; `serve` starts one here."""

    def __init__(self, host: str, port: int, *, limit: timedelta = ANSWER_LIMIT) -> None:
        self.host = host
        self.port = port
        self._limit = limit
        self._server: TCPStore | None = None
        self._errands = Errands(f"store at {host}:{port}")
        # The constructor tries again until its time-out, and a little longer than it says.
        self._tcp: TCPStore = self._call(
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit), limit * 2
        )

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0, *, limit: timedelta = ANSWER_LIMIT) -> TorchStore:
        """Start a store in this process (it listens on all interfaces) and connect to it through `host`.

        It lives as long as this object, whether or not this connection was closed.
        """
        server = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit)
        store = cls(host, server.port, limit=limit)
        store._server = server
        return store

    def set(self, key: str, value: bytes) -> None:
        def call() -> None:
            self._tcp.set(key, self._packed(key, value))  # type: ignore[arg-type]  # takes bytes as well
            self._tcp.check([key])

        self._call(call)

    def get(self, key: str) -> bytes | None:
        return self._call(lambda: self._read(key))

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda: self._tcp.add(key, amount))

    def put_once(self, key: str, value: bytes) -> bytes:
        def call() -> bytes:
            packed = self._packed(key, value)
            held = self._tcp.compare_set(key, b"", packed)  # type: ignore[arg-type]  # takes bytes as well
            if held == packed:
                return value
            self._remove_parts(key, packed)
            return self._unpacked(key, held)

        return self._call(call)

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        def blocking() -> bytes | None:
            end = time.monotonic() + limit.total_seconds()
            while (left := end - time.monotonic()) > 0:
                try:
                    self._tcp.wait([key], timedelta(seconds=left))
                except DistStoreError:
                    return None
                if (value := self._read(key)) is not None:  # None: removed again in between
                    return value
            return None

        if limit > _SHORT:
            return self._call(blocking, limit + self._limit)
        end = time.monotonic() + limit.total_seconds()
        pause = 0.001
        while (value := self.get(key)) is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.02)
        return value

    def delete(self, key: str) -> None:
        def call() -> None:
            if self._tcp.check([key]):
                packed = self._tcp.get(key)
                self._tcp.delete_key(key)
                self._remove_parts(key, packed)

        self._call(call)

    def client(self) -> TorchStore:
        return TorchStore(self.host, self.port, limit=self._limit)

    def close(self) -> None:
        self._errands.close()

    def _call(self, call: Callable[[], T], limit: timedelta | None = None) -> T:
        try:
            return self._errands.run(call, limit or self._limit)
        except RuntimeError as error:  # DistNetworkError: refused, reset, closed by the other side
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StoreLost(self._errands.lose(reason)) from error

    # What follows runs on the errands' thread.

    def _read(self, key: str) -> bytes | None:
        if not self._tcp.check([key]):
            return None
        try:
            return self._unpacked(key, self._tcp.get(key))
        except DistStoreError:  # removed since the check
            return None

    def _packed(self, key: str, value: bytes) -> bytes:
        if len(value) < PART_BYTES:
            return _PLAIN + value
        name = uuid.uuid4().hex
        count = -(-len(value) // PART_BYTES)
        for part in range(count):
            self._tcp.set(f"{key}+{name}.{part}", value[part * PART_BYTES : (part + 1) * PART_BYTES])  # type: ignore[arg-type]  # takes bytes as well
        return _PARTS + json.dumps([name, count]).encode()

    def _unpacked(self, key: str, packed: bytes) -> bytes:
        if packed[:1] == _PARTS:
            name, count = json.loads(packed[1:])
            return b"".join(self._tcp.multi_get([f"{key}+{name}.{part}" for part in range(count)]))
        return packed[1:] if packed[:1] == _PLAIN else packed

    def _remove_parts(self, key: str, packed: bytes) -> None:
        if packed[:1] == _PARTS:
            name, count = json.loads(packed[1:])
            for part in range(count):
                self._tcp.delete_key(f"{key}+{name}.{part}")
