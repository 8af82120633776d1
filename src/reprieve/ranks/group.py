"""The ranks of a job, and what they do together: run something everywhere, then know how it went everywhere.

`agree` is the one building block. Its outcome is a single key, written once: whoever knows first (the last to
arrive, the first to fail, the first whose time ran out) writes it, and everybody else reads it. So all
ranks see one outcome, whatever happens to any of them, and nobody waits without a limit.
No collectives here: a dead rank would hang us.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from reprieve.errors import RankFailed, RanksError, is_permanent
from reprieve.failpoints import reached
from reprieve.ranks.store import Store, prefixed

T = TypeVar("T")

LIMIT = timedelta(minutes=5)
"""How long a rank may come later than the first. Ranks do the same work; minutes mean that something is wrong."""

LEAVE_LIMIT = timedelta(seconds=5)
"""How long the process that serves the store waits for the others at its end. They are done, or never will be."""


class Ranks:
    """The processes of one job, as one of them sees it."""

    def __init__(
        self, rank: int, world_size: int, store: Store | None, *, limit: timedelta = LIMIT, serves: bool = False
    ) -> None:
        """`serves`: the store is in this process, which therefore leaves last."""
        if not 0 <= rank < world_size:
            raise RanksError(f"there is no rank {rank} among {world_size}")
        if store is None and world_size > 1:
            raise RanksError(f"{world_size} ranks need a store to talk through")
        self.rank = rank
        self.world_size = world_size
        self.limit = limit
        self._clients = _Clients(store, world_size, serves=serves) if store is not None else None
        self._prefix = ""
        self._lock = threading.Lock()
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._to_forget: defaultdict[str, deque[int]] = defaultdict(deque)

    @classmethod
    def alone(cls) -> Ranks:
        """A world of one: `agree` just runs the work."""
        return cls(0, 1, None)

    @classmethod
    def detect(cls, limit: timedelta = LIMIT) -> Ranks:
        """The ranks of the job that this process belongs to: see `detect`."""
        from reprieve.ranks.discovery import detect

        return detect(limit)

    @property
    def store(self) -> Store:
        """The store, through a connection that is the calling thread's own."""
        if self._clients is None:
            raise RanksError("a process that is alone has no store")
        mine = self._clients.mine()
        return prefixed(mine, self._prefix) if self._prefix else mine

    def agree(self, name: str, work: Callable[[], T] | None = None, *, limit: timedelta | None = None) -> list[T]:
        """Run `work` here, then wait until every rank has run its own: what each returned, by rank.

        If it raises on any rank, or a rank does not come within the limit (counted from our own arrival), it fails on
        all of them: the rank itself raises its own exception, the others `RankFailed` with its reason. The outcome is
        the same on every rank, also on one that arrives after the decision; work that has failed elsewhere
        already is not begun, and if it misses a file then, that is taken for a consequence.

        Results are what JSON can hold, and bytes; tuples become lists. Every rank calls a name equally often; different
        names may be used by different threads at the same time. Use few names: the last keys of each stay in the store.
        """
        number = self._number(name)
        if self._clients is None:
            reached(f"before {name}")
            value = cast("T", work() if work is not None else None)
            reached(f"publish {name}")
            reached(f"after {name}")
            return [value]
        keys = prefixed(self.store, f"{name}/{number}")
        self._to_forget[name].append(number)
        outcome: bytes | None = None
        try:
            reached(f"before {name}")
            outcome = keys.get("end")
            if outcome is None:
                mine = _encode(work() if work is not None else None)
                reached(f"publish {name}")
                keys.set(str(self.rank), mine)
        except BaseException as error:
            # The others should know at once. Where they cannot be told, their time runs out.
            mine = _encode({"failed": self.rank, "reason": _reason(error), "person": is_permanent(error)})
            with contextlib.suppress(RanksError):
                outcome = keys.put_once("end", mine)
                keys.add("arrived", 1)
                self._forget_older(name)
            if _misses_a_file(error) and outcome not in (None, mine):
                # Removed, because of the other rank's failure: its reason says more.
                raise _failure(_decode(outcome), name) from error
            raise
        if keys.add("arrived", 1) == self.world_size and outcome is None:
            outcome = keys.put_once("end", self._all_results(keys))
        if outcome is None:
            outcome = keys.wait("end", limit or self.limit)
        if outcome is None:
            outcome = keys.put_once("end", self._out_of_time(keys, limit or self.limit))
        with contextlib.suppress(RanksError):  # the outcome stands; the next operation will say that the store is lost
            self._forget_older(name)
        reached(f"after {name}")
        return cast("list[T]", _results(_decode(outcome), name))

    def send(self, name: str, to: int, value: bytes) -> None:
        """Leave `value` for rank `to`, who takes it with `receive`. Does not wait for that."""
        self.store.set(self._letter(name, self.rank, to), value)

    def take_back(self, name: str, to: int) -> None:
        """Remove what was last sent to rank `to` under this name: nobody will receive it."""
        way = f"{name}/{self.rank}-{to}"
        self.store.delete(f"{way}/{self._numbers[way] - 1}")

    def receive(self, name: str, frm: int, *, limit: timedelta | None = None) -> bytes:
        """What rank `frm` sent here under this name, in the order in which it was sent."""
        store = self.store
        key = self._letter(name, frm, self.rank)
        value = store.wait(key, limit or self.limit)
        if value is None:
            seconds = (limit or self.limit).total_seconds()
            raise RankFailed(frm, f"sent nothing to rank {self.rank} within {seconds:g} s", during=name)
        store.delete(key)
        return value

    def scoped(self, prefix: str) -> Ranks:
        """The same ranks, with keys under another prefix and numbers from zero. The connections are shared: closing
        either closes both."""
        scoped = Ranks.__new__(Ranks)
        scoped.rank, scoped.world_size, scoped.limit = self.rank, self.world_size, self.limit
        scoped._clients = self._clients
        scoped._prefix = f"{self._prefix}/{prefix}" if self._prefix else prefix
        scoped._lock = threading.Lock()
        scoped._numbers = defaultdict(int)
        scoped._to_forget = defaultdict(deque)
        return scoped

    def close(self) -> None:
        """This rank is done. Where its process serves the store, wait a little until the others are: who ends before
        they have read the last outcome takes it away from them."""
        if self._clients is not None:
            self._clients.close()

    def _number(self, name: str) -> int:
        """Which operation of this name it is; all ranks count the same, each for itself."""
        with self._lock:
            number = self._numbers[name]
            self._numbers[name] += 1
        return number

    def _letter(self, name: str, frm: int, to: int) -> str:
        way = f"{name}/{frm}-{to}"
        return f"{way}/{self._number(way)}"

    def _all_results(self, keys: Store) -> bytes:
        """Everybody has arrived. One rank collects, so that each of the others reads a single key."""
        return _encode({"all": [_decode(keys.get(str(rank)) or b"null") for rank in range(self.world_size)]})

    def _out_of_time(self, keys: Store, limit: timedelta) -> bytes:
        missing = [rank for rank in range(self.world_size) if keys.get(str(rank)) is None]
        if not missing:
            # The last one died, or is slow, between its arrival and the decision: it is made here.
            return self._all_results(keys)
        return _encode({"missing": missing, "limit_s": limit.total_seconds()})

    def _forget_older(self, name: str) -> None:
        """Rank 0 removes the keys of operations whose outcome nobody will ask for again: of those before one that every
        rank has begun, since a rank begins the next only after it has read the outcome of the last."""
        numbers = self._to_forget[name]
        if self.rank != 0 or len(numbers) < 3:
            return
        store = self.store
        while len(numbers) > 1 and int(store.get(f"{name}/{numbers[1]}/arrived") or 0) >= self.world_size:
            number = numbers.popleft()
            for key in ("end", "arrived", *map(str, range(self.world_size))):
                store.delete(f"{name}/{number}/{key}")


class _Clients:
    """One connection a thread, since a connection serves one call at a time."""

    def __init__(self, store: Store, world_size: int, *, serves: bool) -> None:
        self._store = store
        self._world_size = world_size
        self._serves = serves
        self._local = threading.local()
        self._local.store = store
        self._all: weakref.WeakSet[Store] = weakref.WeakSet([store])
        self._lock = threading.Lock()
        self._closed = False

    def mine(self) -> Store:
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
            mine = self.mine()
            with self._lock:
                first, self._closed = not self._closed, True
            if first and mine.add("closed", 1) == self._world_size:
                mine.set("all closed", b"")
            elif first and self._serves:
                mine.wait("all closed", LEAVE_LIMIT)
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
        return RankFailed(outcome["failed"], outcome["reason"], during=name, permanent=outcome["person"])
    missing = outcome["missing"]
    came = f"did not come within {outcome['limit_s']:g} s"
    if len(missing) == 1:
        return RankFailed(missing[0], came, during=name)
    return RankFailed(None, f"ranks {', '.join(map(str, missing))} {came}", during=name)


def _misses_a_file(error: BaseException) -> bool:
    gone = (errno.ENOENT, errno.ESTALE)  # the second on NFS
    return isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.errno in gone)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_BYTES = "\0bytes"


def _encode(value: Any) -> bytes:
    def other(value: Any) -> dict[str, str]:
        if isinstance(value, bytes | bytearray | memoryview):
            return {_BYTES: base64.b64encode(value).decode()}
        raise TypeError(
            f"ranks cannot tell each other about a {type(value).__name__}: make it of numbers, text and bytes"
        )

    return json.dumps(value, default=other, separators=(",", ":")).encode()


def _decode(data: bytes) -> Any:
    def known(value: dict[str, Any]) -> Any:
        return base64.b64decode(value[_BYTES]) if value.keys() == {_BYTES} else value

    return json.loads(data, object_hook=known)
