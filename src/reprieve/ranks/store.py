"""The store that ranks talk through: small values under string keys, seen by all of them.

Everything that ranks agree on is made of these verbs. Each of them has a time limit, in every implementation: the
training thread must never wait for a host that is no longer there.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

ANSWER_LIMIT = timedelta(seconds=30)
"""How long a store may take to answer. It takes 0.1 ms; seconds, on a host that swaps or has a thousand clients."""


class Store(Protocol):
    """Small values under string keys that all ranks of a job see.

    A client serialises its calls: a thread that waits needs a client of its own. Every verb raises `StoreLost` when
    the store cannot be reached.
    """

    def set(self, key: str, value: bytes) -> None:
        """The key holds `value`, for everybody, when this returns."""

    def get(self, key: str) -> bytes | None:
        """What the key holds, None where there is none. Never waits for it. A counter reads as its digits."""

    def add(self, key: str, amount: int) -> int:
        """Count up, from 0 where there is none; the new sum. For keys that nobody sets."""

    def put_once(self, key: str, value: bytes) -> bytes:
        """The first writer wins; what the key holds now."""

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        """What the key holds, as soon as it is there; None when the limit passed."""

    def delete(self, key: str) -> None:
        """Remove the key; one that is not there is no error."""

    def client(self) -> Store:
        """Another connection to the same store, for another thread."""

    def close(self) -> None:
        """Give the connection back. A verb after this raises `StoreLost`."""


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
    """The same store, seen through keys that all begin with `prefix/`. Closing it closes the store."""
    return _Prefixed(store, prefix)
