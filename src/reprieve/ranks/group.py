"""The ranks of a job, and their agreements: each rank runs something, then all ranks know how it went everywhere.

`agree` is the one building block. Its outcome is a single key, written once: the first rank that knows the outcome
(the last to arrive, the first to fail, the first whose time runs out) writes it, and all others read it. So all ranks
see one outcome, whatever happens to any of them, and no rank waits without a limit.
No collectives here: a dead rank would hang us.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import errno
import json
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from reprieve.errors import RankFailed, RanksError, is_permanent
from reprieve.ranks.failpoints import reached
from reprieve.ranks.store import Store, prefixed

T = TypeVar("T")

LIMIT = timedelta(minutes=5)
"""How much later than the first a rank may arrive. Ranks do the same work: minutes mean that something is wrong."""

LEAVE_LIMIT = timedelta(seconds=5)
"""How long the process that serves the store waits for the others before it closes it."""


class Ranks:
    """The processes of one job, as seen by one of them."""

    def __init__(
        self, rank: int, world_size: int, store: Store | None, *, limit: timedelta = LIMIT, serves: bool = False
    ) -> None:
        """`serves`: this process serves the store, so it leaves last."""
        if not 0 <= rank < world_size:
            raise RanksError(f"there is no rank {rank} among {world_size}")
        if store is None and world_size > 1:
            raise RanksError(f"{world_size} ranks need a store to communicate through")
        self.rank = rank
        self.world_size = world_size
        self.limit = limit
        self._set_up(_Connections(store, world_size, serves=serves) if store is not None else None, prefix="")

    def _set_up(self, connections: _Connections | None, prefix: str) -> None:
        self._connections = connections
        self._prefix = prefix
        self._lock = threading.Lock()
        self._next_numbers: defaultdict[str, int] = defaultdict(int)
        self._undeleted: defaultdict[str, deque[int]] = defaultdict(deque)
        """By name: the operations whose keys are still in the store."""

    @classmethod
    def alone(cls) -> Ranks:
        """Return a world of one: `agree` just runs the work."""
        return cls(0, 1, None)

    @classmethod
    def detect(cls, limit: timedelta = LIMIT) -> Ranks:
        """Return the ranks of the job that this process belongs to (discovery.py)."""
        from reprieve.ranks.discovery import detect

        return detect(limit)

    @property
    def store(self) -> Store:
        """The store, through a connection of the calling thread."""
        if self._connections is None:
            raise RanksError("a process that is alone has no store")
        store = self._connections.of_this_thread()
        return prefixed(store, self._prefix) if self._prefix else store

    def agree(self, name: str, work: Callable[[], T] | None = None, *, limit: timedelta | None = None) -> list[T]:
        """Run `work` here, then wait until every rank has run its own. Returns what each rank returned, by rank.

        If the work raises on any rank, or a rank does not arrive within the limit (counted from our own arrival), the
        agreement fails on all of them: the failed rank raises its own exception, the others raise `RankFailed` with its
        reason. The outcome is the same on every rank, even on one that arrives after the decision. Work that has
        already failed elsewhere is not begun. A missing file after a failure elsewhere counts as a consequence of it.

        Results are JSON values and bytes; tuples become lists. Every rank calls a name equally often. Different threads
        may use different names at the same time. Use few names: the last keys of each stay in the store.
        """
        number = self._number(name)
        if self._connections is None:
            reached(f"before {name}")
            value = cast("T", work() if work is not None else None)
            reached(f"publish {name}")
            reached(f"after {name}")
            return [value]
        keys = prefixed(self.store, f"{name}/{number}")
        self._undeleted[name].append(number)
        outcome: bytes | None = None
        try:
            reached(f"before {name}")
            outcome = keys.get("end")
            if outcome is None:
                result = _encode(work() if work is not None else None)
                reached(f"publish {name}")
                keys.set(str(self.rank), result)
        except BaseException as error:
            # The others should know at once. If the store is lost, their time runs out.
            failure = _encode({"failed": self.rank, "reason": _reason(error), "permanent": is_permanent(error)})
            with contextlib.suppress(RanksError):
                outcome = keys.put_once("end", failure)
                keys.add("arrived", 1)
                self._delete_old_keys(name)
            if _misses_a_file(error) and outcome not in (None, failure):
                # The file was removed because of the other rank's failure: that reason says more.
                raise _failure(_decode(outcome), name) from error
            raise
        if keys.add("arrived", 1) == self.world_size and outcome is None:
            outcome = keys.put_once("end", self._all_results(keys))
        if outcome is None:
            outcome = keys.wait("end", limit or self.limit)
        if outcome is None:
            outcome = keys.put_once("end", self._out_of_time(keys, limit or self.limit))
        with contextlib.suppress(RanksError):  # the outcome stands; the next operation reports that the store is lost
            self._delete_old_keys(name)
        reached(f"after {name}")
        return cast("list[T]", _results(_decode(outcome), name))

    def send(self, name: str, to: int, value: bytes) -> None:
        """Send `value` to rank `to`, which takes it with `receive`. Does not wait for that."""
        self.store.set(self._message_key(name, self.rank, to), value)

    def discard_sent(self, name: str, to: int) -> None:
        """Delete what was last sent to rank `to` under this name, because that rank will not receive it."""
        channel = f"{name}/{self.rank}-{to}"
        self.store.delete(f"{channel}/{self._next_numbers[channel] - 1}")

    def receive(self, name: str, sender: int, *, limit: timedelta | None = None) -> bytes:
        """Return what rank `sender` sent to this rank under this name, in the order of sending."""
        store = self.store
        key = self._message_key(name, sender, self.rank)
        value = store.wait(key, limit or self.limit)
        if value is None:
            seconds = (limit or self.limit).total_seconds()
            raise RankFailed(sender, f"sent nothing to rank {self.rank} within {seconds:g} s", during=name)
        store.delete(key)
        return value

    def scoped(self, prefix: str) -> Ranks:
        """Return the same ranks, with keys under another prefix and numbers from zero. They share the connections:
        closing either closes both."""
        scoped = copy.copy(self)
        scoped._set_up(self._connections, f"{self._prefix}/{prefix}" if self._prefix else prefix)
        return scoped

    def close(self) -> None:
        """Leave the job. If this process serves the store, wait a little until the others have left too: they may still
        have to read the last outcome."""
        if self._connections is not None:
            self._connections.close()

    def _number(self, name: str) -> int:
        """Number the operations of a name. All ranks get the same numbers, because each calls a name equally often."""
        with self._lock:
            number = self._next_numbers[name]
            self._next_numbers[name] += 1
        return number

    def _message_key(self, name: str, sender: int, receiver: int) -> str:
        channel = f"{name}/{sender}-{receiver}"
        return f"{channel}/{self._number(channel)}"

    def _all_results(self, keys: Store) -> bytes:
        """Collect the results after all ranks have arrived. One rank does it, so that the others read a single key."""
        return _encode({"all": [_decode(keys.get(str(rank)) or b"null") for rank in range(self.world_size)]})

    def _out_of_time(self, keys: Store, limit: timedelta) -> bytes:
        missing = [rank for rank in range(self.world_size) if keys.get(str(rank)) is None]
        if not missing:
            # The last rank died, or is slow, between its arrival and its decision: decide here.
            return self._all_results(keys)
        return _encode({"missing": missing, "limit_s": limit.total_seconds()})

    def _delete_old_keys(self, name: str) -> None:
        """On rank 0, delete the keys of operations before one that every rank has begun. No rank reads those again: it
        begins an operation only after it has read the outcome of the one before."""
        numbers = self._undeleted[name]
        if self.rank != 0 or len(numbers) < 3:
            return
        store = self.store
        while len(numbers) > 1 and int(store.get(f"{name}/{numbers[1]}/arrived") or 0) >= self.world_size:
            number = numbers.popleft()
            for key in ("end", "arrived", *map(str, range(self.world_size))):
                store.delete(f"{name}/{number}/{key}")


class _Connections:
    """One connection to the store for each thread, since a connection serves one call at a time."""

    def __init__(self, store: Store, world_size: int, *, serves: bool) -> None:
        self._store = store
        self._world_size = world_size
        self._serves = serves
        self._local = threading.local()
        self._local.store = store
        self._all: weakref.WeakSet[Store] = weakref.WeakSet([store])
        self._lock = threading.Lock()
        self._closed = False

    def of_this_thread(self) -> Store:
        store: Store | None = getattr(self._local, "store", None)
        if store is None:
            store = self._store.client()
            with self._lock:
                if self._closed:
                    store.close()
                self._all.add(store)
            self._local.store = store
        return store

    def close(self) -> None:
        with contextlib.suppress(RanksError):
            store = self.of_this_thread()
            with self._lock:
                is_first, self._closed = not self._closed, True
            if is_first and store.add("closed", 1) == self._world_size:
                store.set("all closed", b"")
            elif is_first and self._serves:
                store.wait("all closed", LEAVE_LIMIT)
        with self._lock:
            self._closed = True
            for store in list(self._all):
                store.close()


def _results(outcome: Any, name: str) -> list[Any]:
    if "all" not in outcome:
        raise _failure(outcome, name)
    results: list[Any] = outcome["all"]
    return results


def _failure(outcome: Any, name: str) -> RankFailed:
    if "failed" in outcome:
        return RankFailed(outcome["failed"], outcome["reason"], during=name, permanent=outcome["permanent"])
    missing = outcome["missing"]
    reason = f"did not arrive within {outcome['limit_s']:g} s"
    if len(missing) == 1:
        return RankFailed(missing[0], reason, during=name)
    return RankFailed(None, f"ranks {', '.join(map(str, missing))} {reason}", during=name)


def _misses_a_file(error: BaseException) -> bool:
    missing = (errno.ENOENT, errno.ESTALE)  # the second on NFS
    return isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.errno in missing)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_BYTES = "\0bytes"


def _encode(value: Any) -> bytes:
    def other(value: Any) -> dict[str, str]:
        if isinstance(value, bytes | bytearray | memoryview):
            return {_BYTES: base64.b64encode(value).decode()}
        raise TypeError(f"ranks cannot exchange a {type(value).__name__}: use numbers, strings, bytes, lists and dicts")

    return json.dumps(value, default=other, separators=(",", ":")).encode()


def _decode(data: bytes) -> Any:
    def known(value: dict[str, Any]) -> Any:
        return base64.b64decode(value[_BYTES]) if value.keys() == {_BYTES} else value

    return json.loads(data, object_hook=known)
