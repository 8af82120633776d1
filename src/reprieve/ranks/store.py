"""The store that ranks communicate through: small values under string keys, seen by all of them.

All agreements between ranks are made of these verbs. Each of them has a time limit, in every implementation: the
training thread must never wait for a host that is gone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

ANSWER_LIMIT = timedelta(seconds=30)
"""How long a store may take to answer. It takes 0.1 ms, or seconds on a host that swaps or has a thousand clients."""


class Store(Protocol):
    """Small values under string keys that all ranks of a job see.

    A client serialises its calls: a thread that waits needs its own client. Every verb raises `StoreLost` if the store
    cannot be reached.
    """

    def set(self, key: str, value: bytes) -> None:
        """Set a key. All ranks see the value when this returns."""

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it is not set. Never waits for it. A counter reads as its digits."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0. Returns the new sum. For keys that are never `set`."""

    def put_once(self, key: str, value: bytes) -> bytes:
        """Set a key if it is not set. Returns the value that it has now: the first writer wins."""

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        """Return the value of a key as soon as it is set; None if the limit passes first."""

    def delete(self, key: str) -> None:
        """Delete a key, if it is set."""

    def client(self) -> Store:
        """Return another connection to the same store, for another thread."""

    def close(self) -> None:
        """Close the connection. Every later call raises `StoreLost`."""


class _Prefixed:
    """A view of a store with all keys under a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        return self._store.get(f"{self._prefix}/{key}")

    def add(self, key: str, amount: int) -> int:
        return self._store.add(f"{self._prefix}/{key}", amount)

    def put_once(self, key: str, value: bytes) -> bytes:
        return self._store.put_once(f"{self._prefix}/{key}", value)

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        return self._store.wait(f"{self._prefix}/{key}", limit)

    def delete(self, key: str) -> None:
        self._store.delete(f"{self._prefix}/{key}")

    def client(self) -> Store:
        return _Prefixed(self._store.client(), self._prefix)

    def close(self) -> None:
        self._store.close()


def prefixed(store: Store, prefix: str) -> Store:
    """Return a view of the store in which all keys begin with `prefix/`. Closing it closes the store."""
    return _Prefixed(store, prefix)
