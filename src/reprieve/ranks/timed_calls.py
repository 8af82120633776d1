"""A thread that makes calls which may block for ever, for callers who wait only so long.

A hung network file system has no time limit: when its server is gone, a call never comes back. It does so here,
on a thread that nobody waits for.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # its own class before Python 3.11
from datetime import timedelta
from typing import Any, TypeVar

from reprieve.errors import StoreLost

T = TypeVar("T")

_Queue = queue.SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class TimedCaller:
    """One thread, one call at a time, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lost: str | None = None
        self._queue: _Queue = queue.SimpleQueue()
        # The thread knows the queue, not this object: when the last user has gone, so does the thread.
        threading.Thread(target=_run, args=(self._queue,), name=f"reprieve {name}", daemon=True).start()
        self._end = weakref.finalize(self, self._queue.put, None)

    def run(self, call: Callable[[], T], limit: timedelta) -> T:
        """What `call` returns or raises; `StoreLost` when it has done neither within the limit, and ever after."""
        if self._lost is not None:
            raise StoreLost(self._lost)
        future: Future[T] = Future()
        self._queue.put((future, call))
        try:
            return future.result(limit.total_seconds())
        except FutureTimeout:
            if future.done():  # it was the call itself that raised it
                raise
            raise StoreLost(self.lose(f"no answer within {limit.total_seconds():g} s")) from None
        finally:
            del future  # it holds an exception whose traceback holds this frame

    def lose(self, reason: str) -> str:
        """Every later call fails at once; the message it fails with."""
        self._lost = self._lost or f"the {self.name} that the ranks talk through is lost: {reason}"
        return self._lost

    def close(self) -> None:
        self.lose("it was closed here")
        self._end()


def _run(errands: _Queue) -> None:
    while (errand := errands.get()) is not None:
        future, call = errand
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)
        del errand, future, call
