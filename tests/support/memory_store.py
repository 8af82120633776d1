"""A store inside one process, for ranks that are threads."""

from __future__ import annotations

import threading
from datetime import timedelta

from reprieve.errors import StoreLost


class MemoryStore:
    """A store in a dict, which passes the contract suite."""

    def __init__(self, shared: MemoryStore | None = None) -> None:
        self.keys: dict[str, bytes] = shared.keys if shared else {}
        self._changed: threading.Condition = shared._changed if shared else threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._open():
            self.keys[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes | None:
        with self._open():
            return self.keys.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._open():
            total = int(self.keys.get(key, b"0")) + amount
            self.keys[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def put_once(self, key: str, value: bytes) -> bytes:
        with self._open():
            held = self.keys.setdefault(key, bytes(value))
            self._changed.notify_all()
            return held

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        with self._open():
            self._changed.wait_for(lambda: key in self.keys or self._closed, limit.total_seconds())
            self._check_open()
            return self.keys.get(key)

    def delete(self, key: str) -> None:
        with self._open():
            self.keys.pop(key, None)

    def client(self) -> MemoryStore:
        return MemoryStore(self)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _open(self) -> threading.Condition:
        self._check_open()
        return self._changed

    def _check_open(self) -> None:
        if self._closed:
            raise StoreLost("the store in memory was closed here")
